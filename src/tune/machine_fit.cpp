#include "tune/machine_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "sim/machine_fields.h"
#include "tune/median.h"
#include "uniep/error.h"

namespace uniep::tune {
namespace {

using sim::MachineDescription;

constexpr double kOutlier = 3;       // errors, from which on a number counts less
constexpr double kMostSpreads = 3;   // that a constant moves
constexpr double kStep = 0.5;        // spreads, to find how times follow a constant: queues make them uneven
constexpr double kTold = 0.85;       // of its spread, that is left where layers say something
constexpr int kSteps = 12;           // of the fit, at most
constexpr int kWholeSteps = 3;       // of these, from the first on, with slopes worked out anew
constexpr double kEnough = 0.002;    // of the sum of squares, that a step gains
constexpr double kMostDamping = 64;  // with which a step is tried
constexpr int kThirds = 3;

struct Moved {
  const char* key;
  bool share;
  double spread;
};
constexpr double kShare = 0.04;
constexpr Moved kMoved[] = {{"clock.limit", false, 0.12},
                            {"clock.limit_exponent", false, 0.25},
                            {"clock.pause", false, 0.12},
                            {"clock.pause_drop", false, 0.5},
                            {"clock.highest", false, 0.06},
                            {"clock.rest", false, 0.4},
                            {"clock.linked", true, 0.02},
                            {"copy.task", false, 0.4},
                            {"copy.chunk_in", false, 0.4},
                            {"copy.chunk_out", false, 0.6},
                            {"copy.chunk_remote", true, 0.3},
                            {"copy.chunk_fixed", false, 0.3},
                            {"copy.alone", false, 0.15},
                            {"copy.push", false, 0.5},
                            {"copy.send", false, 0.4},
                            {"copy.ring", false, 0.3},
                            {"port.in", false, 0.3},
                            {"port.out", false, 0.3},
                            {"pipeline.latency", false, 0.3},
                            {"pipeline.port", false, 0.1},
                            {"memory.bandwidth", false, 0.25},
                            {"sums.beside", false, 0.4},
                            {"sums.alone", false, 0.3},
                            {"slowdown.copies", true, kShare},
                            {"slowdown.mixed_list", true, kShare},
                            {"slowdown.mixed_list_pause", true, kShare},
                            {"slowdown.mixed_queues", true, kShare},
                            {"slowdown.raster_8", true, kShare},
                            {"slowdown.raster_4", true, kShare},
                            {"slowdown.cluster_1", true, kShare},
                            {"slowdown.static_queue", true, kShare},
                            {"time.begin", false, 0.4},
                            {"time.peers", true, 4},
                            {"time.launch", false, 1.0},
                            {"time.end", false, 0.4},
                            {"time.flag", false, 0.6},
                            {"time.late_blocks", false, 0.4}};
constexpr double kTileSpread = 0.4, kLinkSpread = 0.25;
constexpr double kSameKind = 0.2;  // of its spread, that is left of a constant that was measured on GPUs of this kind

// Work on all indices by several threads; the first error is thrown once all have ended.
template <typename Work>
void in_parallel(std::size_t count, int threads, Work&& work) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr problem;
  std::mutex mutex;
  const auto run = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        work(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!problem) problem = std::current_exception();
      }
    }
  };
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  {
    std::vector<std::jthread> others;
    others.reserve(count);
    try {
      for (int i = 1; i < std::min<int>(threads, static_cast<int>(count)); ++i) others.emplace_back(run);
    } catch (const std::system_error&) {  // those that there are do all of it
    }
    run();
  }
  if (problem) std::rethrow_exception(problem);
}

// x of A x = b, for a symmetric positive A by rows, of which the lower triangle is read and overwritten.
std::vector<double> solved(std::vector<double>& a, std::vector<double> b, std::vector<double>& inverse_diagonal) {
  const std::size_t n = b.size();
  for (std::size_t j = 0; j < n; ++j) {  // Cholesky, the lower triangle in place
    for (std::size_t i = j; i < n; ++i) {
      double sum = a[i * n + j];
      for (std::size_t k = 0; k < j; ++k) sum -= a[i * n + k] * a[j * n + k];
      a[i * n + j] = i == j ? std::sqrt(sum) : sum / a[j * n + j];
    }
  }
  const auto substitute = [&](std::vector<double> x) {
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t k = 0; k < i; ++k) x[i] -= a[i * n + k] * x[k];
      x[i] /= a[i * n + i];
    }
    for (std::size_t i = n; i-- > 0;) {
      for (std::size_t k = i + 1; k < n; ++k) x[i] -= a[k * n + i] * x[k];
      x[i] /= a[i * n + i];
    }
    return x;
  };
  inverse_diagonal.assign(n, 0);
  for (std::size_t i = 0; i < n; ++i) {
    std::vector<double> unit(n);
    unit[i] = 1;
    inverse_diagonal[i] = substitute(std::move(unit))[i];
  }
  return substitute(std::move(b));
}

// Constants move in units of their spread.
class Fitter {
 public:
  explicit Fitter(const FitRequest& request) : request_(request), constants_(constants_of(request)) {
    for (const std::vector<double>& calls : request.milliseconds) {
      numbers_.push_back({{std::log(median(calls)), request.layer_error}});
    }
    for (const std::vector<FitNumber>& timeline : request.timelines) {
      numbers_.emplace_back();
      for (const FitNumber& number : timeline) numbers_.back().push_back({std::log(number.measured), number.error});
    }
    for (std::size_t i = 0; i < numbers_.size(); ++i) {
      if (!request.held_out.empty() && request.held_out[i]) continue;
      fitted_.push_back(i);
      for (const FitNumber& number : numbers_[i]) rows_.push_back({number.measured, number.error, i, {}, 0});
    }
    if (fitted_.empty()) throw Error(Status::kInvalidArgument, "calibration: no layers; must be at least one");
    find_clocks();
    moves_.assign(unknowns(), 1);
    move_.assign(unknowns(), 0);
    MachineDescription base = *request.base;
    for (const FitConstant& constant : constants_) {
      const double value = constant_of(base, constant.key);
      const double by = constant.share ? constant.least - value : -std::numeric_limits<double>::infinity();
      least_move_.push_back(std::clamp(by / constant.spread, -kMostSpreads, 0.0));
    }
    least_move_.resize(unknowns(), -kMostSpreads);
  }

  MachineFit run() {
    MachineFit fit;
    std::vector<std::size_t> all(numbers_.size());
    std::iota(all.begin(), all.end(), 0);
    const std::vector<double> base = predicted(all, move_);
    predicted_ = of_fitted(base);
    find_slopes();
    bool fresh = true;
    for (int step = 0; step < kSteps; ++step) {
      if (fresh) leave_untold();
      const bool gained = take_step();
      if (fresh && !gained) break;
      // Where the next slopes are worked out anew, or where nothing is gained by those that were learnt.
      fresh = step + 1 < kWholeSteps || !gained;
      if (fresh) find_slopes();
    }
    fit.machine = moved(move_);
    give(base, fit.base_predicted, fit.base_timelines);
    give(predicted(all, move_), fit.predicted, fit.timelines);
    const std::vector<std::vector<double>> thirds = third_steps();
    fit.constants = fitted_constants(spreads(thirds, fit.machine), fit.machine);
    fit.disagreement = disagreement(thirds);
    fit.has_thirds = !thirds.empty();
    fit.predictions = predictions_;
    return fit;
  }

 private:
  // A number that is fitted; `of`: its layer, or timeline behind the layers.
  struct Row {
    double measured;  // its logarithm
    double error;
    std::size_t of;
    std::optional<std::size_t> turn;  // that has a clock of its own
    double of_clock;                  // how its logarithm follows that, in the turn's spreads; by the slopes
  };
  std::size_t rows() const { return rows_.size(); }
  // Constants, then turns' clocks.
  std::size_t unknowns() const { return constants_.size() + turns_; }
  std::size_t layers() const { return request_.milliseconds.size(); }
  double& slope(std::size_t row, std::size_t constant) { return slopes_[row * constants_.size() + constant]; }
  // Likewise, of all unknowns.
  double follows(std::size_t row, std::size_t unknown) {
    if (unknown < constants_.size()) return slope(row, unknown);
    return rows_[row].turn == unknown - constants_.size() ? rows_[row].of_clock : 0;
  }

  static std::vector<FitConstant> constants_of(const FitRequest& request) {
    std::vector<FitConstant> constants = fit_constants(*request.base, request.ranks);
    for (const int ranks : request.timeline_ranks) {
      for (FitConstant& constant : fit_constants(*request.base, ranks)) {
        const auto same = [&](const FitConstant& one) { return one.key == constant.key; };
        if (std::none_of(constants.begin(), constants.end(), same)) constants.push_back(std::move(constant));
      }
    }
    if (request.same_kind) hold_what_is_known(constants, *request.base);
    return constants;
  }
  // GPUs of one kind differ in how far power and cooling let them clock, and hardly in anything else.
  static void hold_what_is_known(std::vector<FitConstant>& constants, const MachineDescription& base) {
    for (FitConstant& constant : constants) {
      const auto origin = base.origin.find(constant.key);
      const bool measured = origin != base.origin.end() && origin->second.source == sim::Source::kMeasured;
      if (measured && constant.key != "clock.limit" && constant.key != "clock.pause") constant.spread *= kSameKind;
    }
  }

  MachineDescription moved(const std::vector<double>& move) const {
    MachineDescription machine = *request_.base;
    for (std::size_t i = 0; i < constants_.size(); ++i) {
      const FitConstant& constant = constants_[i];
      double& value = constant_of(machine, constant.key);
      const double before = value, by = move[i] * constant.spread;
      if (by == 0) continue;
      value = std::clamp(constant.share ? value + by : value * std::exp(by), constant.least, constant.most);
      if (value - constant.least < 1e-12) value = constant.least;
      // The clock after a pause falls to what it has after a longer one, and both belong to the GPU.
      if (constant.key == "clock.pause") machine.clock.pause_lowest *= value / before;
      if (constant.key == "clock.highest") machine.pipeline.port *= before / value;  // memory has its own
    }
    machine.clock.pause_lowest = std::min(machine.clock.pause_lowest, machine.clock.pause);
    return machine;
  }

  // Logarithms of what one layer, or timeline, has on a machine.
  std::vector<double> logarithms(std::size_t which, const MachineDescription& machine) const {
    if (which < layers()) return {std::log(request_.predict(which, machine))};
    std::vector<double> numbers = request_.predict_timeline(which - layers(), machine);
    for (double& number : numbers) number = std::log(number);
    if (numbers.size() == numbers_[which].size()) return numbers;
    throw Error(Status::kInternal, fmt::format("calibration: timeline {} has {} numbers, and {} are predicted",
                                               which - layers(), numbers_[which].size(), numbers.size()));
  }
  std::vector<double> predicted(const std::vector<std::size_t>& which, const std::vector<double>& move) {
    const MachineDescription machine = moved(move);
    std::vector<std::vector<double>> each(which.size());
    in_parallel(which.size(), request_.threads, [&](std::size_t i) { each[i] = logarithms(which[i], machine); });
    predictions_ += static_cast<int>(which.size());
    std::vector<double> all;
    for (const std::vector<double>& one : each) all.insert(all.end(), one.begin(), one.end());
    return all;
  }
  // Of all numbers those that are fitted.
  std::vector<double> of_fitted(const std::vector<double>& all) const {
    std::vector<double> some;
    std::size_t at = 0, fitted = 0;
    for (std::size_t i = 0; i < numbers_.size(); at += numbers_[i++].size()) {
      if (fitted == fitted_.size() || fitted_[fitted] != i) continue;
      ++fitted;
      for (std::size_t number = 0; number < numbers_[i].size(); ++number) some.push_back(all[at + number]);
    }
    return some;
  }
  // All numbers, which are logarithms, by layer and timeline.
  void give(const std::vector<double>& all, std::vector<double>& of_layers,
            std::vector<std::vector<double>>& of_timelines) const {
    std::size_t at = 0;
    for (std::size_t i = 0; i < numbers_.size(); ++i) {
      if (i >= layers()) of_timelines.emplace_back();
      for (std::size_t number = 0; number < numbers_[i].size(); ++number) {
        (i < layers() ? of_layers : of_timelines.back()).push_back(std::exp(all[at++]));
      }
    }
  }

  // Layers that took turns ran at one clock, which neither constants nor the layers' loads explain.
  void find_clocks() {
    for (Row& row : rows_) {
      if (row.of >= request_.turns.size()) continue;
      row.turn = request_.turns[row.of];
      turns_ = std::max(turns_, *row.turn + 1);
    }
  }
  // A turn's clock does to a time what the limit does, or after a pause the clock that there is then.
  void find_clock_slopes() {
    for (std::size_t constant = 0; constant < constants_.size(); ++constant) {
      const FitConstant& clock = constants_[constant];
      if (clock.key != "clock.limit" && clock.key != "clock.pause") continue;
      for (std::size_t row = 0; row < rows(); ++row) {
        const double by = slope(row, constant) / clock.spread * kTurnClockError;
        if (by != 0) rows_[row].of_clock = by;
      }
    }
  }

  void find_slopes() {
    struct Wanted {
      std::size_t of, row, constant;
    };
    std::vector<Wanted> wanted;
    for (std::size_t i = 0, row = 0; i < fitted_.size(); row += numbers_[fitted_[i++]].size()) {
      for (std::size_t constant = 0; constant < constants_.size(); ++constant) {
        const bool follows = !request_.follows || request_.follows(fitted_[i], constants_[constant].key);
        if (follows) wanted.push_back({fitted_[i], row, constant});
      }
    }
    std::vector<MachineDescription> machines;
    for (std::size_t constant = 0; constant < constants_.size(); ++constant) {
      std::vector<double> beside = move_;
      beside[constant] += kStep;
      machines.push_back(moved(beside));
    }
    slopes_.assign(rows() * constants_.size(), 0);
    in_parallel(wanted.size(), request_.threads, [&](std::size_t i) {
      const Wanted& one = wanted[i];
      const std::vector<double> there = logarithms(one.of, machines[one.constant]);
      for (std::size_t number = 0; number < there.size(); ++number) {
        slope(one.row + number, one.constant) = (there[number] - predicted_[one.row + number]) / kStep;
      }
    });
    predictions_ += static_cast<int>(wanted.size());
    find_clock_slopes();
  }

  double residual(std::size_t row, const std::vector<double>& predicted, const std::vector<double>& move) const {
    const Row& own = rows_[row];
    const double clock = own.turn ? move[constants_.size() + *own.turn] * own.of_clock : 0;
    return own.measured - predicted[row] - clock;
  }
  double weight(std::size_t row, double residual) const {
    const double error = rows_[row].error;
    return std::min(1.0, kOutlier * error / std::max(std::abs(residual), 1e-9)) / (error * error);
  }
  double sum_of_squares(const std::vector<double>& predicted, const std::vector<double>& move) const {
    double sum = 0;
    for (const double one : move) sum += one * one;
    for (std::size_t row = 0; row < rows(); ++row) {
      const double error = rows_[row].error, outlier = kOutlier * error;
      const double by = std::abs(residual(row, predicted, move)), inside = std::min(by, outlier);
      sum += (inside * inside + 2 * outlier * (by - inside)) / (error * error);
    }
    return sum;
  }

  // How constants move for residuals of the rows, by the slopes; `pull`: with the base's hold on what has moved.
  std::vector<double> step_for(const std::vector<double>& residuals, bool pull, double damping = 0,
                               std::vector<double>* left = nullptr) {
    const std::size_t n = unknowns();
    std::vector<double> a(n * n), b(n), inverse;
    for (std::size_t i = 0; i < n; ++i) {
      a[i * n + i] = moves_[i] ? 1 + damping : 1e12;
      if (pull) b[i] = -move_[i];
    }
    for (std::size_t row = 0; row < rows(); ++row) {
      const double w = weight(row, residual(row, predicted_, move_));
      for (std::size_t i = 0; i < n; ++i) {
        const double si = follows(row, i) * w;
        if (si == 0) continue;
        b[i] += si * residuals[row];
        for (std::size_t j = 0; j <= i; ++j) a[i * n + j] += si * follows(row, j);
      }
    }
    std::vector<double> step = solved(a, std::move(b), inverse);
    if (left != nullptr) *left = std::move(inverse);
    return step;
  }

  // What was measured says little about: that stays as the base has it.
  void leave_untold() {
    moves_.assign(unknowns(), 1);
    std::vector<double> none(rows()), left;
    step_for(none, false, 0, &left);
    for (std::size_t i = 0; i < constants_.size(); ++i) moves_[i] = move_[i] != 0 || std::sqrt(left[i]) < kTold;
  }

  // Levenberg's and Marquardt's. Whether it gains.
  bool take_step() {
    std::vector<double> residuals;
    for (std::size_t row = 0; row < rows(); ++row) residuals.push_back(residual(row, predicted_, move_));
    const double before = sum_of_squares(predicted_, move_);
    for (; damping_ <= kMostDamping; damping_ = std::max(1.0, 4 * damping_)) {
      const std::vector<double> step = step_for(residuals, true, damping_);
      std::vector<double> there = move_;
      for (std::size_t i = 0; i < there.size(); ++i) {
        if (moves_[i]) there[i] = std::clamp(there[i] + step[i], least_move_[i], kMostSpreads);
      }
      const std::vector<double> times = predicted(fitted_, there);
      const double after = sum_of_squares(times, there);
      if (after >= before) continue;
      learn(there, times);
      move_ = std::move(there);
      predicted_ = times;
      damping_ = damping_ > 1 ? damping_ / 4 : 0;
      return after < before * (1 - kEnough);
    }
    damping_ = 0;
    return false;
  }

  // Slopes that agree with the step that was taken (Broyden's rule).
  void learn(const std::vector<double>& there, const std::vector<double>& times) {
    double length = 0;
    for (std::size_t i = 0; i < constants_.size(); ++i) length += std::pow(there[i] - move_[i], 2);
    if (length == 0) return;
    for (std::size_t row = 0; row < rows(); ++row) {
      double missed = times[row] - predicted_[row];
      for (std::size_t i = 0; i < constants_.size(); ++i) missed -= slope(row, i) * (there[i] - move_[i]);
      for (std::size_t i = 0; i < constants_.size(); ++i) {
        if (slope(row, i) != 0) slope(row, i) += missed * (there[i] - move_[i]) / length;
      }
    }
  }

  // How far each third of the calls would move the constants from here, by the slopes; timelines stay as they are.
  // Empty where calls are too few.
  std::vector<std::vector<double>> third_steps() {
    if (fitted_.front() >= layers()) return {};
    std::vector<std::vector<double>> steps;
    for (int third = 0; third < kThirds; ++third) {
      std::vector<double> residuals;
      for (const Row& row : rows_) {
        if (row.of >= layers()) {
          residuals.push_back(0);
          continue;
        }
        const std::vector<double>& calls = request_.milliseconds[row.of];
        if (calls.size() < kThirds) return {};
        const std::size_t begin = calls.size() * third / kThirds, end = calls.size() * (third + 1) / kThirds;
        residuals.push_back(std::log(median({calls.begin() + begin, calls.begin() + end})) - row.measured);
      }
      steps.push_back(step_for(residuals, false));
    }
    return steps;
  }

  // Of a number by thirds: the largest less the smallest.
  template <typename Value>
  static double apart(const std::vector<std::vector<double>>& steps, Value&& value) {
    if (steps.empty()) return 0;
    double least = value(steps.front()), most = least;
    for (const std::vector<double>& step : steps) {
      least = std::min(least, value(step));
      most = std::max(most, value(step));
    }
    return most - least;
  }

  std::vector<double> spreads(const std::vector<std::vector<double>>& steps, MachineDescription machine) const {
    std::vector<double> shares;
    for (std::size_t i = 0; i < constants_.size(); ++i) {
      const double by = apart(steps, [&](const auto& step) { return step[i]; }) * constants_[i].spread;
      shares.push_back(constants_[i].share ? by / (1 + constant_of(machine, constants_[i].key)) : std::expm1(by));
    }
    return shares;
  }

  double disagreement(const std::vector<std::vector<double>>& steps) {
    double sum = 0;
    int count = 0;
    for (std::size_t row = 0; row < rows(); ++row) {
      if (rows_[row].of >= layers()) continue;
      ++count;
      sum += apart(steps, [&](const auto& step) {
        double moved = 0;
        for (std::size_t i = 0; i < step.size(); ++i) moved += moves_[i] ? follows(row, i) * step[i] : 0;
        return moved;
      });
    }
    return count == 0 ? 0 : std::expm1(sum / static_cast<double>(count));
  }

  std::vector<FittedConstant> fitted_constants(const std::vector<double>& shares, MachineDescription machine) const {
    std::vector<FittedConstant> all;
    MachineDescription base = *request_.base;
    for (std::size_t i = 0; i < constants_.size(); ++i) {
      const std::string& key = constants_[i].key;
      all.push_back({constants_[i], constant_of(base, key), constant_of(machine, key), moves_[i] != 0,
                     moves_[i] ? shares[i] : 0});
    }
    return all;
  }

  const FitRequest& request_;
  std::vector<FitConstant> constants_;
  std::vector<std::vector<FitNumber>> numbers_;  // of all layers, then timelines; logarithms
  std::vector<std::size_t> fitted_;              // of these, ascending
  std::vector<Row> rows_;                        // their numbers, one after the other
  std::size_t turns_ = 0;
  std::vector<char> moves_;         // by unknown
  std::vector<double> move_;        // by unknown, in its spreads
  std::vector<double> least_move_;  // likewise
  std::vector<double> predicted_;   // by row
  std::vector<double> slopes_;      // [row, constant]
  double damping_ = 0;              // of the next step
  int predictions_ = 0;
};

}  // namespace

double& constant_of(MachineDescription& machine, std::string_view key) {
  for (const sim::NumberField& field : sim::number_fields()) {
    if (key == fmt::format("{}.{}", field.section, field.key)) return field.of(machine);
  }
  for (std::size_t i = 0; i < machine.tiles.size(); ++i) {
    if (key == fmt::format("tiles[{}].cycles", i)) return machine.tiles[i].cycles;
  }
  for (std::size_t i = 0; i < machine.links.size(); ++i) {
    for (std::size_t j = 0; j < machine.links[i].rates.size(); ++j) {
      sim::LinkRate& rate = machine.links[i].rates[j];
      const std::string at = fmt::format("links[{}].rates[{}].", i, j);
      if (key == at + "read") return rate.read;
      if (key == at + "write") return rate.write;
      if (key == at + "both") return rate.both;
    }
  }
  throw Error(Status::kInternal, fmt::format("calibration: no constant '{}'", key));
}

std::vector<FitConstant> fit_constants(const MachineDescription& machine, int ranks) {
  std::vector<FitConstant> constants;
  for (const Moved& moved : kMoved) {
    for (const sim::NumberField& field : sim::number_fields()) {
      if (moved.key != fmt::format("{}.{}", field.section, field.key)) continue;
      // A slowdown below 0 is noise that the solver would follow.
      const double least = moved.share ? std::max(0.0, field.least) : field.least;
      constants.push_back({moved.key, moved.share, moved.spread, least, field.most});
    }
  }
  for (std::size_t i = 0; i < machine.tiles.size(); ++i) {
    constants.push_back({fmt::format("tiles[{}].cycles", i), false, kTileSpread, 0, 1e9});
  }
  if (ranks == 1 || machine.links.empty()) return constants;
  for (std::size_t j = 0; j < machine.links.front().rates.size(); ++j) {
    if (machine.links.front().rates[j].ranks != ranks) continue;
    for (const char* way : {"read", "write", "both"}) {
      constants.push_back({fmt::format("links[0].rates[{}].{}", j, way), false, kLinkSpread, 0.001, 1e6});
    }
  }
  return constants;
}

MachineFit fit_machine(const FitRequest& request) {
  return Fitter(request).run();
}

}  // namespace uniep::tune
