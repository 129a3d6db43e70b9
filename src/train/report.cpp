#include "train/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/checksum.h"

namespace uniep::train {
namespace {

nlohmann::ordered_json schedule_json(const Schedule& schedule) {
  return nlohmann::ordered_json::parse(uniep::to_json(schedule));
}

nlohmann::ordered_json tuning_json(const Tuner& tuner) {
  const TunerSpent spent = tuner.spent();
  nlohmann::ordered_json json = {{"layers_ms", spent.layers_milliseconds},
                                 {"lost_ms", spent.lost_milliseconds},
                                 {"tried_calls", spent.tried_calls}};
  json["decisions"] = nlohmann::ordered_json::array();
  for (const TunerDecision& decision : tuner.decisions()) {
    json["decisions"].push_back({{"step", decision.step},
                                 {"direction", decision.direction == Direction::kForward ? "forward" : "backward"},
                                 {"verdict", decision.verdict},
                                 {"schedule", uniep::to_text(decision.schedule)},
                                 {"ratio", decision.ratio},
                                 {"pairs", decision.pairs},
                                 {"reason", decision.reason}});
  }
  return json;
}

std::string checksum_of(const Trainer& trainer) {
  return io::to_hex16(weights_checksum(trainer.parameters()));
}

}  // namespace

bool Report::all_equal() const {
  return std::all_of(comparisons.begin(), comparisons.end(), [](const Comparison& c) { return c.difference.empty(); });
}

nlohmann::ordered_json to_json(const Report& report, const Trainer& trainer, const Text& text) {
  const TrainConfig& config = trainer.config();
  const ModelConfig& model = config.model;
  const Group& group = trainer.experts().group();
  nlohmann::ordered_json json;
  json["engine"] = group.engine() == EngineKind::kCuda ? "cuda" : "cpu";
  json["ranks"] = group.ranks();
  json["workers"] = group.workers();
  json["shape"] = {
      {"hidden", model.hidden}, {"intermediate", model.intermediate}, {"experts", model.experts}, {"topk", model.topk}};
  json["model"] = {{"activation", activation_text(model.numerics)},
                   {"router_weight", router_weight_text(model.numerics.router_weight)},
                   {"bias", model.numerics.bias},
                   {"layers", model.layers},
                   {"sequence", model.sequence},
                   {"parameters", trainer.layout().count()}};
  json["training"] = {
      {"batch", config.batch}, {"learning_rate", config.learning_rate},   {"balance_weight", config.balance_weight},
      {"seed", config.seed},   {"resumed_after_step", report.first_step}, {"last_step", report.last_step}};
  json["text"] = {{"files", text.files},
                  {"training_bytes", text.training.size()},
                  {"held_out_bytes", text.held_out.size()},
                  {"hash", io::to_hex16(text.hash)}};
  json["schedule"] = schedule_json(trainer.experts().schedule());
  json["schedule_backward"] = schedule_json(trainer.experts().schedule_backward());
  json["steps"] = nlohmann::ordered_json::array();
  for (const StepRecord& step : report.record.steps) {
    json["steps"].push_back({{"step", step.step},
                             {"loss", step.loss},
                             {"balance_loss", step.balance_loss},
                             {"tokens_per_second", step.tokens_per_second},
                             {"layer_ms", step.layer_milliseconds}});
  }
  json["evaluations"] = nlohmann::ordered_json::array();
  for (const EvaluationRecord& evaluation : report.record.evaluations) {
    json["evaluations"].push_back({{"step", evaluation.step}, {"held_out_loss", evaluation.loss}});
  }
  if (const Tuner* const tuner = trainer.experts().tuner()) json["tuning"] = tuning_json(*tuner);
  json["weights_checksum"] = checksum_of(trainer);
  if (trainer.experts().checks() > 0) {
    json["verify"] = {{"checks", trainer.experts().checks()}, {"findings", trainer.findings()}};
  }
  json["comparisons"] = nlohmann::ordered_json::array();
  for (const Comparison& comparison : report.comparisons) {
    nlohmann::ordered_json entry = {
        {"run", comparison.name}, {"ranks", comparison.ranks}, {"equal", comparison.difference.empty()}};
    if (!comparison.difference.empty()) entry["first_difference"] = comparison.difference;
    json["comparisons"].push_back(entry);
  }
  return json;
}

std::string to_text(const Report& report, const Trainer& trainer, const Text& text) {
  const RunRecord& record = report.record;
  std::string out = fmt::format("text: {} files, {} bytes to train on, {} held out\n", text.files.size(),
                                text.training.size(), text.held_out.size());
  out += fmt::format("model: {} parameters, {} of them in experts; steps {} to {} on {} ranks\n",
                     trainer.layout().count(), trainer.layout().count() - trainer.layout().dense_count(),
                     report.first_step + 1, report.last_step, trainer.experts().group().ranks());
  out += fmt::format("loss (nats a byte): {:.4f} -> {:.4f}", record.steps.front().loss, record.steps.back().loss);
  out += record.evaluations.size() > 1 ? fmt::format("; held-out {:.4f} -> {:.4f}\n", record.evaluations.front().loss,
                                                     record.evaluations.back().loss)
                                       : fmt::format("; held-out {:.4f}\n", record.evaluations.back().loss);
  if (const Tuner* const tuner = trainer.experts().tuner()) {
    const TunerSpent spent = tuner->spent();
    out += fmt::format("tuning: {} decisions", tuner->decisions().size());
    if (spent.layers_milliseconds > 0) {
      out += fmt::format(", {:.2f} % of the time in layers lost to trying",
                         100 * spent.lost_milliseconds / spent.layers_milliseconds);
    }
    out += '\n';
    out += fmt::format("forward: {}\nbackward: {}\n", uniep::to_text(trainer.experts().schedule()),
                       uniep::to_text(trainer.experts().schedule_backward()));
  }
  out += fmt::format("weights: checksum {}\n", checksum_of(trainer));
  for (const Comparison& comparison : report.comparisons) {
    out += fmt::format("compared with {}: ", comparison.name);
    out += comparison.difference.empty() ? "all losses and final weights are equal to the bit\n"
                                         : fmt::format("DIFFERENT at {}\n", comparison.difference);
  }
  return out;
}

}  // namespace uniep::train
