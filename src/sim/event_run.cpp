#include "sim/event_run.h"

#include <fmt/format.h>

#include <algorithm>

#include "program/token_groups.h"
#include "sim/warp_pieces.h"
#include "uniep/error.h"

namespace uniep::sim {
namespace {

constexpr double kMostTaken = 0.5;      // of a tile, that copies beside it take
constexpr double kStagger = 0.02;       // us between the first copies of two workers
constexpr double kUnhiddenStore = 3.0;  // us until a tile's results count that no next tile runs beside

bool is_gemm(Stage stage) {
  return stage >= Stage::kFirstGemm && stage <= Stage::kWgradFc1;
}

}  // namespace

EventRun::EventRun(const Program& program, const MachineDescription& machine, const SimulateOptions& options,
                   const Load& load)
    : program_(program),
      machine_(machine),
      options_(options),
      costs_(load.costs),
      relayed_share_(load.relayed_share),
      times_(program.request(), program.rank(0), machine, options.state, load.clock_ghz),
      layout_(signal_layout(program.rank(0))),
      simulated_(options.one_rank ? 1 : program.ranks()),
      helpers_(!times_.own_copy_class),
      links_(machine, program.ranks(), options.one_rank),
      ranks_(static_cast<std::size_t>(simulated_)) {}

EventRun::Result EventRun::run() {
  for (int32_t rank = 0; rank < simulated_; ++rank) prepare_rank(rank);
  if (options_.one_rank) mirror_what_nobody_makes();
  for (int32_t rank = 0; rank < simulated_; ++rank)
    push_event(machine_.begin_us(program_.ranks()), Kind::kLaunch, rank);
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    switch (event.kind) {
      case Kind::kBegin:
        try_begin(event.who, event.time);
        break;
      case Kind::kEnd:
        end(event.who, event.time);
        break;
      case Kind::kStored: {
        const Stored stored = stored_[event.who];
        free_stored_.push_back(event.who);
        signal_task(stored.rank, stored.task, event.time);
        if (stored.partner.has_tile()) signal_task(stored.rank, stored.partner, event.time);
        ranks_[stored.rank].last = std::max(ranks_[stored.rank].last, event.time);
        break;
      }
      case Kind::kLaunch:
        begin_launch(event.who, event.time);
        break;
      case Kind::kNext:
        advance(event.who, event.time);
        break;
    }
  }
  for (const Agent& agent : agents_) {
    if (agent.done && ranks_[agent.rank].launch == program(agent.rank).launches) continue;
    throw Error(Status::kInternal,
                fmt::format("simulator: rank {}, worker {} waits for ever at {} (expert {}, m {}, n {})", agent.rank,
                            agent.worker, stage_name(agent.task.stage, program(agent.rank).direction),
                            agent.task.expert, agent.task.m, agent.task.n));
  }
  for (const RankState& state : ranks_) {
    result_.end_us.push_back(state.last + machine_.time.end);
    result_.gemm_us_of_rank.push_back(state.gemm_us);
    result_.load_us_of_rank.push_back(state.load_us);
    result_.memory_bytes.push_back(state.memory_bytes);
  }
  return std::move(result_);
}

void EventRun::prepare_rank(int32_t rank) {
  const RankProgram& p = program(rank);
  RankState& state = ranks_[rank];
  state.signals.assign(layout_.counter_total + layout_.flag_total, 0);
  state.waiting.assign(state.signals.size(), -1);
  for (int32_t peer = 0; peer < p.ranks; ++peer) {
    state.signals[layout_.counter_total + layout_.flags[static_cast<int>(FlagSpace::kArrive)] + peer] = 1;
  }
  agents_of_rank_ = 2 * p.workers;
  for (int32_t worker = 0; worker < p.workers; ++worker) {
    for (const AgentRole role : {AgentRole::kCopy, AgentRole::kCompute}) {
      Agent agent;
      agent.rank = rank;
      agent.worker = worker;
      agent.role = role;
      agents_.push_back(std::move(agent));
    }
  }
}

void EventRun::begin_launch(int32_t rank, double now) {
  const RankProgram& p = program(rank);
  RankState& state = ranks_[rank];
  state.live = agents_of_rank_;
  state.copies_left =
      list_length(p, state.launch, ListKind::kDispatch) + list_length(p, state.launch, ListKind::kRelay);
  state.computes.assign(p.workers, 0);
  state.taken.assign(p.workers, 0);
  state.pair_came.assign(p.workers / 2 + 1, 0);
  state.sums.clear();
  for (int32_t worker = 0; worker < p.workers; ++worker) {
    state.sums.emplace_back(p, state.launch, ListKind::kReduce, worker, WalkStyle{.sum_tokens = kCudaSumTokens});
    const Participants who = participants_of(p, state.launch, ListKind::kCompute);
    state.computes[worker] =
        worker >= who.begin && worker < who.end && list_length(p, state.launch, ListKind::kCompute) > 0;
  }
  for (int32_t i = 0; i < agents_of_rank_; ++i) {
    const int32_t index = rank * agents_of_rank_ + i;
    Agent& agent = agents_[index];
    agent.list = 0;
    agent.in_list = agent.leads_pair = agent.follows = agent.done = false;
    agent.sent = 0;
    push_event(now + (agent.role == AgentRole::kCopy ? kStagger * agent.worker : 0.0), Kind::kNext, index);
  }
}

// ---- Walking -------------------------------------------------------------------------------------------------------

bool EventRun::walks(const Agent& agent, ListKind kind) const {
  const RankProgram& p = program(agent.rank);
  const int32_t launch = ranks_[agent.rank].launch;
  if (helpers_ && kind == ListKind::kReduce) {
    const Participants who = participants_of(p, launch, kind);
    return agent.worker >= who.begin && agent.worker < who.end;
  }
  return walks_list(p, launch, agent.worker, agent.role, kind);
}

// False: a pair's second worker leaves its list to the first.
bool EventRun::enter_list(int32_t index, double now) {
  Agent& agent = agents_[index];
  const RankProgram& p = program(agent.rank);
  RankState& state = ranks_[agent.rank];
  const ListKind kind = static_cast<ListKind>(agent.list);
  agent.in_list = true;
  agent.walk = {};
  if (!walks(agent, kind) || kind == ListKind::kReduce) return true;
  const bool in_pair = kind == ListKind::kCompute && p.cluster == 2;
  agent.walk = ListWalk(p, state.launch, kind, agent.worker, {.for_a_pair = in_pair});
  if (!in_pair || agent.walk.empty()) return true;
  agent.leads_pair = agent.worker % 2 == 0;
  agent.follows = !agent.leads_pair;
  if (!agent.follows) return true;
  state.pair_came[agent.worker / 2] = 1;
  const int32_t leader = index - 2;
  if (agents_[leader].leads_pair && agents_[leader].in_list) push_event(now, Kind::kNext, leader);
  return false;
}

void EventRun::leave_list(int32_t index, double now) {
  Agent& agent = agents_[index];
  const bool computed = static_cast<ListKind>(agent.list) == ListKind::kCompute;
  agent.in_list = agent.follows = false;
  ++agent.list;
  if (computed && agent.role == AgentRole::kCompute) ranks_[agent.rank].computes[agent.worker] = 0;
  if (!agent.leads_pair) return;
  agent.leads_pair = false;
  const int32_t second = index + 2;
  leave_list(second, now);
  push_event(now, Kind::kNext, second);
}

void EventRun::advance(int32_t index, double now) {
  Agent& agent = agents_[index];
  RankState& state = ranks_[agent.rank];
  Counters counters{*this, agent.rank, layout_.counters[static_cast<int>(CounterSpace::kTickets)]};
  for (; agent.list < kListKinds; leave_list(index, now)) {
    if (!agent.in_list && !enter_list(index, now)) return;
    if (agent.follows) return;
    if (agent.leads_pair && !state.pair_came[agent.worker / 2]) return;
    const bool sums = static_cast<ListKind>(agent.list) == ListKind::kReduce;
    if (sums && !walks(agent, ListKind::kReduce)) continue;
    ListWalk& walk = sums ? state.sums[agent.worker] : agent.walk;
    while (walk.next(counters)) {
      agent.task = walk.task();
      agent.partner = agent.leads_pair ? walk.partners_task() : Task{agent.task.stage, -1, kNoTile, 0};
      agent.tokens = walk.tokens();
      if (!agent.task.has_tile() && !agent.partner.has_tile()) continue;
      agent.wait_begin = now;
      collect_waits(agent);
      try_begin(index, now);
      return;
    }
    if (agent.copied > now) {
      push_event(agent.copied, Kind::kNext, index);
      return;
    }
    agent.under_way.clear();
  }
  end_launch(index, now);
}

void EventRun::end_launch(int32_t index, double now) {
  Agent& agent = agents_[index];
  RankState& state = ranks_[agent.rank];
  agent.done = true;
  state.last = std::max(state.last, now);
  if (--state.live > 0) return;
  ++state.launch;
  if (state.launch < program(agent.rank).launches)
    push_event(state.last + machine_.time.launch, Kind::kLaunch, agent.rank);
}

void EventRun::collect_waits(Agent& agent) {
  const RankProgram& p = program(agent.rank);
  agent.waits.clear();
  agent.satisfied = 0;
  struct Collector {
    std::vector<Wait>& waits;
    const SignalLayout& layout;
    void operator()(const CounterWait& wait) {
      waits.push_back({layout.counters[static_cast<int>(wait.space)] + wait.index, wait.threshold});
    }
    void operator()(const FlagWait& wait) {
      waits.push_back({layout.counter_total + layout.flags[static_cast<int>(wait.space)] + wait.index, 1});
    }
  } collector{agent.waits, layout_};
  if (agent.task.stage != Stage::kReduce) {
    for_each_wait(p, agent.task, collector);
    if (agent.partner.has_tile()) for_each_wait(p, agent.partner, collector);
    return;
  }
  // Those of the item's tokens alone.
  program::TokenGroups groups(p.experts, p.combine_groups);
  agent.summands = 0;
  for (int32_t position = agent.tokens.begin; position < agent.tokens.end; ++position) {
    const int32_t token = summed_token(p, position);
    const int64_t first = int64_t{token} * p.topk;
    for (int64_t entry = first; entry < first + p.topk; ++entry) {
      const int32_t expert = p.expert_of_slot[entry];
      if (expert < 0) continue;
      agent.summands += groups.is_first(token, expert);
      const int32_t unit = p.combine_groups > 0 ? agent.task.m : block_of_row(p, expert, p.row_of_slot[entry]);
      collector(FlagWait{FlagSpace::kCombined, combined_flag(p, p.rank_of_expert[expert], unit, agent.task.n)});
    }
  }
}

void EventRun::try_begin(int32_t index, double now) {
  Agent& agent = agents_[index];
  RankState& state = ranks_[agent.rank];
  for (; agent.satisfied < agent.waits.size(); ++agent.satisfied) {
    const Wait& wait = agent.waits[agent.satisfied];
    if (state.signals[wait.signal] >= wait.threshold) continue;
    agent.next_waiting = state.waiting[wait.signal];
    state.waiting[wait.signal] = index;
    return;
  }
  begin(index, now);
}

// ---- Tasks ---------------------------------------------------------------------------------------------------------

double EventRun::take_memory(RankState& state, double now, double bytes) {
  state.memory_bytes += bytes;
  return state.memory_free = std::max(state.memory_free, now) + bytes / (machine_.memory.bandwidth * 1e3);
}

void EventRun::begin(int32_t index, double now) {
  Agent& agent = agents_[index];
  agent.begin = now;
  double end = now;
  switch (agent.task.stage) {
    case Stage::kPull:
    case Stage::kPush:
    case Stage::kReceive:
      end = copy_end(agent, now);
      break;
    case Stage::kSend:
    case Stage::kGroupSend:
      end = send_end(agent, now);
      break;
    case Stage::kReduce:
      end = reduce_end(agent, now);
      break;
    default:
      end = gemm_end(agent, now);
      break;
  }
  push_event(end, Kind::kEnd, index);
}

// All warps of a worker that does nothing else copy at once, so that as many tasks are under way: what links and memory
// take keeps it from the next one only then. When it takes the next one; `there`: when its rows are.
double EventRun::next_copy(Agent& agent, double taken, double there) {
  agent.copied = std::max(agent.copied, there);
  agent.under_way.push_back(agent.copied);
  if (agent.under_way.size() < static_cast<std::size_t>(machine_.port.warps)) return taken;
  const double first = agent.under_way.front();
  agent.under_way.pop_front();
  return std::max(taken, first);
}

void EventRun::take_from_tiles(const Agent& agent, int32_t rows) {
  const RankProgram& p = program(agent.rank);
  std::vector<double>& taken = ranks_[agent.rank].taken;
  if (!p.on_sms) {
    taken[agent.worker] += rows * times_.taken_from_tiles;
    return;
  }
  for (double& one : taken) one += rows * times_.taken_from_tiles / p.workers;
}

// us, at most `most`; a pair takes what its two workers have in the mean.
double EventRun::taken_from(const Agent& agent, double most) {
  double* const taken = &ranks_[agent.rank].taken[agent.worker];
  const int workers = agent.leads_pair ? 2 : 1;
  const double all = (taken[0] + (workers == 2 ? taken[1] : 0)) / workers;
  if (all <= 0) return 0;
  const double now = std::min(all, most);
  for (int i = 0; i < workers; ++i) taken[i] *= 1 - now / all;
  return now;
}

// That a copy pulls from other ranks.
int32_t EventRun::remote_rows(const Agent& agent, const CopyWork& work) const {
  const PeerRows* const peers = costs_[agent.rank].peers();
  int32_t rows = 0;
  for (int32_t i = work.peers_begin; i < work.peers_end; ++i) rows += peers[i].peer == agent.rank ? 0 : peers[i].rows;
  return rows;
}

double EventRun::copy_end(Agent& agent, double now) {
  const RankProgram& p = program(agent.rank);
  RankState& state = ranks_[agent.rank];
  const RankCosts& costs = costs_[agent.rank];
  --state.copies_left;
  const bool pushes = agent.task.stage == Stage::kPush;
  CopyWork work;
  if (pushes) {
    work.rows_in = work.rows_out = costs.pushed_rows(agent.task);
  } else {
    work = costs.copy(agent.task);
  }
  const WarpCopies& copy = machine_.copy;
  const double row = static_cast<double>(times_.row_bytes);
  double takes = 0;
  if (p.on_sms) {
    const PortCopies& port = machine_.port;
    takes = row * 1e-6 * (work.rows_in * port.in + work.rows_out * port.out) * (1 + port.overhead) +
            0.5 * copy.task / port.warps;
    takes *= times_.copy_clock;
  } else {
    const double share = state.started ? 1.0 : copy.alone;
    takes = share * copy.task + share * times_.warp_chunk * static_cast<double>(times_.chunks_of_row) *
                                    (copy.chunk_in * work.rows_in + copy.chunk_remote * remote_rows(agent, work) +
                                     copy.chunk_out * work.rows_out);
    if (agent.task.stage != Stage::kPull) takes += 0.5 * copy.push;
    takes *= times_.copy_clock / times_.copy_workers;
  }
  take_from_tiles(agent, work.rows_out);
  double end = std::max(now + takes, take_memory(state, now, row * (work.rows_in + work.rows_out)));
  const auto carry = [&](int32_t from, int32_t to, int32_t rows) {
    if (from == to || rows == 0) return;
    const bool relayed = machine_.level_between(from, to) > 0;
    const double bytes = rows * row * (relayed ? relayed_share_ : 1.0);
    const Links::Kind kind = pushes ? Links::Kind::kWrite : Links::Kind::kRead;
    end = std::max(end, links_.carry(now, from, to, bytes, kind) + links_.latency(from, to));
  };
  if (pushes) carry(agent.rank, p.rank_of_expert[agent.task.expert], work.rows_in);
  for (int32_t i = work.peers_begin; !pushes && i < work.peers_end; ++i) {
    carry(costs.peers()[i].peer, agent.rank, costs.peers()[i].rows);
  }
  return p.on_sms ? next_copy(agent, now + takes, end) : end;
}

double EventRun::send_end(Agent& agent, double now) {
  const RankProgram& p = program(agent.rank);
  RankState& state = ranks_[agent.rank];
  const Task& task = agent.task;
  const int64_t width = int64_t{2} * (p.chunk_column[task.n + 1] - p.chunk_column[task.n]);
  const int64_t pieces =
      (width + program_.request().schedule.comm.chunk_bytes - 1) / program_.request().schedule.comm.chunk_bytes;
  int64_t in = 0, out = 0;
  double end = now;
  const auto carry = [&](int32_t to, int64_t rows) {
    if (to == agent.rank || rows == 0) return;
    const Links::Kind kind = state.copies_left > 0 ? Links::Kind::kBoth : Links::Kind::kWrite;
    const double bytes = static_cast<double>(rows * width);
    end = std::max(end, links_.carry(now, agent.rank, to, bytes, kind) + links_.latency(agent.rank, to));
  };
  if (task.stage == Stage::kSend) {
    const RankCosts::Sources sources = costs_[agent.rank].sources(p.block_begin[task.expert] + task.m);
    for (const PeerRows* source = sources.begin; source != sources.end; ++source) {
      in += source->rows;
      carry(source->peer, source->rows);
    }
    out = in;
  } else {
    program::TokenGroups groups(p.experts, p.combine_groups);
    for_each_row_of_tokens(p, task.expert, task.m, [&](int32_t token, int32_t, int32_t row) {
      ++in;
      out += groups.is_first(token, p.first_expert + local_expert_holding(p, row));
    });
    carry(task.expert, out);
  }
  double takes = 0;
  if (p.on_sms) {
    takes = static_cast<double>(width) * 1e-6 * (in * machine_.port.in + out * machine_.port.out) *
            (1 + machine_.port.overhead) * times_.copy_clock;
  } else {
    const double piece =
        send_piece(machine_.copy, program_.request().schedule.comm, static_cast<double>(width)) * times_.copy_clock;
    takes = static_cast<double>(std::max(in, out) * pieces) * piece / times_.copy_workers;
  }
  end = std::max(end, take_memory(state, now, static_cast<double>((in + out) * width)));
  return std::max(end, now + takes);
}

double EventRun::reduce_end(Agent& agent, double now) {
  const RankProgram& p = program(agent.rank);
  RankState& state = ranks_[agent.rank];
  const int32_t chunk = agent.task.n;
  const double width = 2.0 * (p.chunk_column[chunk + 1] - p.chunk_column[chunk]);
  const double rows = static_cast<double>(agent.summands) + (agent.tokens.end - agent.tokens.begin);
  // Those that are reserved sum nothing.
  const double all = times_.own_copy_class ? p.workers : machine_.class_of(Work::kReduce).count;
  double rate = 0;  // GB/s of this agent
  if (times_.own_copy_class) {
    rate = machine_.sums.alone / all;
  } else if (state.computes[agent.worker]) {
    rate = machine_.sums.beside / machine_.class_of(Work::kReduce).count;
    agent.counted = agent.role == AgentRole::kCopy;
    state.summing += agent.counted;
  } else {
    rate = 0.5 * machine_.sums.alone / all;
  }
  return std::max(now + rows * width * sum_share(width) / (rate * 1e3), take_memory(state, now, rows * width));
}

// What a tile is the first to read: weights with an expert's first row block, rows with a block's first column tile.
// Others find both in L2.
double EventRun::operand_bytes(const RankProgram& p, const Task& task) const {
  if (!task.has_tile()) return 0;
  const double hidden = p.wgrad_fc2.rows, intermediate = p.wgrad_fc2.columns, z_columns = p.wgrad_fc1.rows;
  const bool forward = p.direction == Direction::kForward, first = task.stage == Stage::kFirstGemm;
  if (task.stage >= Stage::kWgradFc2) {
    const WgradGrid& grid = task.stage == Stage::kWgradFc2 ? p.wgrad_fc2 : p.wgrad_fc1;
    const double rows = p.expert_rows[p.first_expert + task.expert];
    return 2 * rows * ((task.n == 0 ? grid.tile_m : 0) + (task.m == 0 ? grid.tile_n : 0));
  }
  const double depth = first ? hidden : (forward ? intermediate : z_columns);
  const double columns = first ? (forward ? z_columns : intermediate) / p.first_tiles : p.second_tile_n;
  return 2 * depth * ((task.n == 0 ? p.tile_m : 0) + (task.m == 0 ? columns : 0));
}

double EventRun::gemm_end(Agent& agent, double now) {
  const RankProgram& p = program(agent.rank);
  RankState& state = ranks_[agent.rank];
  const Task& task = agent.task.has_tile() ? agent.task : agent.partner;
  state.started = true;
  double takes = times_.gemm(p, task);
  if (task.stage == Stage::kFirstGemm) takes *= times_.slow_first;
  if (task.stage == Stage::kSecondGemm) takes *= times_.slow_second;
  state.gemm_us += takes * (agent.leads_pair ? 2 : 1);
  state.load_us += takes * times_.load(task) * (agent.leads_pair ? 2 : 1);
  if (!times_.own_copy_class) {
    takes += taken_from(agent, kMostTaken * takes);
    takes *= 1 + machine_.slowdown.sums * state.summing / p.workers;
  }
  double end =
      std::max(now + takes, take_memory(state, now, operand_bytes(p, agent.task) + operand_bytes(p, agent.partner)));
  // Results leave through a tile's next one: it can not end before they have.
  if (task.stage == Stage::kSecondGemm && p.epilogue_combine) end = std::max(end, agent.sent);
  return end;
}

double EventRun::results_sent(const Agent& agent, const Task& task, double now) {
  const RankProgram& p = program(agent.rank);
  if (!task.has_tile() || task.stage != Stage::kSecondGemm || !p.epilogue_combine) return 0;
  const double width = 2.0 * static_cast<double>(times_.output_columns(p, task));
  const RankCosts::Sources sources = costs_[agent.rank].sources(p.block_begin[task.expert] + task.m);
  const Links::Kind kind = ranks_[agent.rank].copies_left > 0 ? Links::Kind::kBoth : Links::Kind::kWrite;
  double sent = 0;
  for (const PeerRows* source = sources.begin; source != sources.end; ++source) {
    if (source->peer == agent.rank) continue;
    sent = std::max(sent, links_.carry(now, agent.rank, source->peer, source->rows * width, kind));
  }
  return sent;
}

void EventRun::end(int32_t index, double now) {
  Agent& agent = agents_[index];
  account(agent, now);
  if (is_gemm(agent.task.stage)) {
    end_gemm(index, now);
    return;
  }
  const Task task = agent.task;
  if (task.stage == Stage::kReduce) {
    ranks_[agent.rank].summing -= agent.counted;
    agent.counted = false;
  } else if (agent.copied > now) {
    push_event(agent.copied, Kind::kStored, place_of({agent.rank, task, Task{task.stage, -1, kNoTile, 0}}));
  } else {
    signal_task(agent.rank, task, now);
  }
  advance(index, now);
}

int32_t EventRun::place_of(const Stored& stored) {
  if (free_stored_.empty()) {
    stored_.push_back(stored);
    return static_cast<int32_t>(stored_.size()) - 1;
  }
  const int32_t place = free_stored_.back();
  free_stored_.pop_back();
  stored_[place] = stored;
  return place;
}

// Of the first GEMM: z or dz, and the activation beside it.
double EventRun::stored_columns(const RankProgram& p) {
  return static_cast<double>(p.wgrad_fc1.rows + p.wgrad_fc2.columns);
}

// Of a tile's results, and of what they are added to.
double EventRun::stored_bytes(const RankProgram& p, Stage stage) const {
  if (stage == Stage::kFirstGemm) return 2.0 * p.tile_m * stored_columns(p) / p.first_tiles;
  if (stage != Stage::kWgradFc1 && stage != Stage::kWgradFc2) return 2.0 * p.tile_m * p.second_tile_n;
  const WgradGrid& grid = stage == Stage::kWgradFc1 ? p.wgrad_fc1 : p.wgrad_fc2;
  const WeightGradient mode = program_.request().numerics.weight_gradient;
  const double each = mode == WeightGradient::kBFloat16 ? 2 : mode == WeightGradient::kFloat32 ? 4 : 8;
  return each * grid.tile_m * grid.tile_n;
}

// A tile's results are stored while the next one runs, and count from then on.
void EventRun::end_gemm(int32_t index, double now) {
  Agent& agent = agents_[index];
  const Task task = agent.task, partner = agent.partner;
  const double sent = std::max(results_sent(agent, task, now), results_sent(agent, partner, now));
  agent.sent = sent;
  const int32_t rank = agent.rank;
  RankState& state = ranks_[rank];
  const RankProgram& p = program(rank);
  const int32_t place = place_of({rank, task, partner});
  advance(index, now);
  const Agent& after = agents_[index];
  const bool runs_on = !after.done && after.begin == now && is_gemm(after.task.stage) && after.in_list;
  double stored =
      now + (runs_on && after.task.stage <= Stage::kSecondGemm ? times_.late_store(after.task) : kUnhiddenStore);
  if (task.stage == Stage::kFirstGemm && machine_.has_activation_stage()) {
    const double bytes = 2.0 * p.tile_m * stored_columns(p) / p.first_tiles;
    state.activation_free = std::max(state.activation_free, now) + bytes / (machine_.sums.alone * 1e3);
    stored = std::max(stored, state.activation_free);
  }
  const double bytes = stored_bytes(p, task.stage);
  stored = std::max(stored, take_memory(state, now, bytes * (partner.has_tile() ? 2 : 1)));
  push_event(std::max(stored, sent), Kind::kStored, place);
}

void EventRun::account(const Agent& agent, double now) {
  for (const Task* task : {&agent.task, &agent.partner}) {
    if (!task->has_tile()) continue;
    Totals& totals = result_.stage[static_cast<std::size_t>(task->stage)];
    if (totals.begin_us < 0 || agent.begin < totals.begin_us) totals.begin_us = agent.begin;
    totals.end_us = std::max(totals.end_us, now);
    totals.busy_us += now - agent.begin;
    ++result_.tasks;
    if (!options_.record) continue;
    result_.timeline.push_back({agent.rank, agent.worker + (task == &agent.partner), agent.role == AgentRole::kCopy,
                                *task, agent.tokens.begin, agent.tokens.end, agent.wait_begin, agent.begin, now});
  }
}

}  // namespace uniep::sim
