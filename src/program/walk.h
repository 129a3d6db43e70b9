#pragma once

#include "program/wgrad_queues.h"

// How agents go through their lists: the static shares, the tickets of dynamic queues, the queues of mixed GEMMs and
// of weight gradients beside dgrads, and the pairs of workers of clusters. The counters of tickets are a parameter:
// atomics where agents run side by side, plain numbers where one thread plays all of them. They have
//   int64_t taken(int64_t counter) const   how many tickets have been asked for; see ticket_counter()
//   int64_t take(int64_t counter)          asks for the next one
namespace uniep::program {

// How a worker walks.
struct WalkStyle {
  bool for_a_pair = false;           // the first worker of a pair
  int32_t sum_tokens = kTokenBlock;  // tokens that are summed at a time; divides kTokenBlock
  int32_t share = 0, shares = 1;     // of the agents that share a worker's copies this one takes every shares-th
};

// The CUDA engine's warps sum so many tokens at a time (transfer/reduce.h).
inline constexpr int32_t kCudaSumTokens = 2;

// Tokens of a rank, as positions of summed_token().
struct TokenRange {
  int32_t begin, end;
};

// One list of a launch, as one worker walks it. The first worker of a pair walks for both: a step is two tasks.
class ListWalk {
 public:
  ListWalk() = default;
  ListWalk(const RankProgram& p, int32_t launch, ListKind kind, int32_t worker, const WalkStyle& style = {})
      : p_(&p), launch_(launch), kind_(kind), worker_(worker), style_(style) {
    const Participants who = participants_of(p, launch, kind);
    if (worker < who.begin || worker >= who.end) return;
    if (kind == ListKind::kReduce) sums_ = (p.tokens + style.sum_tokens - 1) / style.sum_tokens;
    length_ = kind != ListKind::kReduce  ? list_length(p, launch, kind)
              : p.stages[launch].combine ? static_cast<int64_t>(sums_) * p.chunks
                                         : 0;
    if (is_copy_list(kind)) index_ = style.share;
    if (kind != ListKind::kCompute || length_ == 0) return;
    if (has_wgrad_queues(p, launch)) {
      in_wgrad_queues_ = true;
      wgrad_queues_ = wgrad_queues(p, launch);
      wgrad_walk_ = begin_walk(p, launch, worker, wgrad_queues_);
      cursor_ = wgrad_walk_.cursor;
    }
    if (!has_gemm_queues(p, launch)) return;
    in_gemm_queues_ = true;
    queues_ = gemm_queues(p, launch);
    queue_walk_ = begin_walk(p, launch, worker, queues_);
    begin_ = gemm_positions(p, queues_);
  }

  bool empty() const { return length_ == 0; }

  // Goes to the next position; false at the end, for good. In clusters a position may be without a tile.
  template <typename Counters>
  bool next(Counters&& counters) {
    if (length_ == 0) return false;
    if (in_wgrad_queues_) return next_in_wgrad_queues(counters);
    if (in_gemm_queues_) {
      if (next_in_gemm_queues(counters)) return true;
      in_gemm_queues_ = false;
    }
    const int64_t position = take_position(counters);
    if (position >= length_) return false;
    task_ = task_at(position);
    if (style_.for_a_pair) partners_task_ = task_at(position + 1);
    return true;
  }

  const Task& task() const { return task_; }
  const Task& partners_task() const { return partners_task_; }
  TokenRange tokens() const { return tokens_; }  // of a task of kReduce

 private:
  template <typename Counters>
  bool next_in_gemm_queues(Counters&& counters) {
    struct OfQueues {
      Counters& counters;
      int32_t launch;
      int64_t taken(GemmQueue queue) const { return counters.taken(ticket_counter(launch, queue)); }
      int64_t take(GemmQueue queue) { return counters.take(ticket_counter(launch, queue)); }
    };
    const GemmTicket ticket = take_gemm_ticket(*p_, queues_, queue_walk_, OfQueues{counters, launch_});
    if (!ticket.found) return false;
    const int64_t position = ticket.index * p_->cluster;
    task_ = segment_task(*p_, ticket.segment, position);
    if (style_.for_a_pair) partners_task_ = segment_task(*p_, ticket.segment, position + 1);
    return true;
  }

  template <typename Counters>
  bool next_in_wgrad_queues(Counters&& counters) {
    struct OfQueues {
      Counters& counters;
      int32_t launch;
      int64_t taken(LayerQueue queue) const { return counters.taken(ticket_counter(launch, queue)); }
      int64_t take(LayerQueue queue) { return counters.take(ticket_counter(launch, queue)); }
    };
    const LayerTicket ticket = take_layer_ticket(*p_, launch_, wgrad_queues_, wgrad_walk_, OfQueues{counters, launch_});
    if (ticket.queue == LayerQueue::kNone) return false;
    task_ = task_of_ticket(*p_, wgrad_queues_, ticket, 0, cursor_);
    if (style_.for_a_pair) partners_task_ = task_of_ticket(*p_, wgrad_queues_, ticket, 1, cursor_);
    return true;
  }

  // In a pair a ticket is for two positions.
  template <typename Counters>
  int64_t take_position(Counters&& counters) {
    if (p_->dynamic) return begin_ + counters.take(ticket_counter(launch_, kind_)) * (style_.for_a_pair ? 2 : 1);
    const int64_t index = index_;
    index_ += is_copy_list(kind_) ? style_.shares : 1;
    return static_position(*p_, participants_of(*p_, launch_, kind_), worker_, index);
  }

  Task task_at(int64_t position) {
    if (kind_ != ListKind::kReduce) return list_task(*p_, launch_, kind_, position, cursor_);
    const int32_t begin = static_cast<int32_t>(position % sums_) * style_.sum_tokens;
    tokens_ = {begin, begin + style_.sum_tokens < p_->tokens ? begin + style_.sum_tokens : p_->tokens};
    return {Stage::kReduce, -1, begin / kTokenBlock, static_cast<int32_t>(position / sums_)};
  }

  const RankProgram* p_ = nullptr;
  int32_t launch_ = 0;
  ListKind kind_ = ListKind::kDispatch;
  int32_t worker_ = 0;
  WalkStyle style_;
  int64_t length_ = 0;
  int32_t sums_ = 0;   // of a column chunk, at style_.sum_tokens tokens each
  int64_t index_ = 0;  // static queues: of the worker's next position among those that fall to it
  int64_t begin_ = 0;  // dynamic: positions before this one are those of the GEMM queues
  ListCursor cursor_;
  bool in_gemm_queues_ = false;
  GemmQueues queues_{};
  GemmQueueWalk queue_walk_{};
  bool in_wgrad_queues_ = false;
  WgradQueues wgrad_queues_{};
  WgradQueueWalk wgrad_walk_{};
  Task task_{}, partners_task_{};
  TokenRange tokens_{};
};

// One agent: all lists of its role, launch by launch.
class AgentWalk {
 public:
  AgentWalk(const RankProgram& p, int32_t worker, AgentRole role, const WalkStyle& style = {})
      : p_(&p), worker_(worker), role_(role), style_(style) {}

  enum class Step {
    kTask,        // task() is next; for a pair's first worker partners_task() beside it, and either may have no tile
    kPairBegins,  // a pair's second worker has come to the compute list: its first may begin
    kHandedOver,  // a pair's second worker: what comes next is what its first hands over, until leave_pair()
    kPairEnds,    // a pair's first worker has come to the end of the compute list
    kLaunchEnds,  // until next_launch()
  };

  template <typename Counters>
  Step next(Counters&& counters) {
    for (;;) {
      if (list_ == kListKinds) return Step::kLaunchEnds;
      if (!in_list_) {
        enter_list();
        if (pair_role_ == PairRole::kSecond) return Step::kPairBegins;
      }
      if (pair_role_ == PairRole::kSecond) return Step::kHandedOver;
      while (walk_.next(counters)) {
        if (walk_.task().has_tile() || pair_role_ == PairRole::kFirst) return Step::kTask;
      }
      const bool ends_pair = pair_role_ == PairRole::kFirst;
      leave_list();
      if (ends_pair) return Step::kPairEnds;
    }
  }

  // A pair's second worker, once its first has come to the end.
  void leave_pair() { leave_list(); }
  void next_launch() {
    ++launch_;
    list_ = 0;
  }

  int32_t launch() const { return launch_; }
  bool finished() const { return launch_ == p_->launches; }
  bool leads_pair() const { return pair_role_ == PairRole::kFirst; }
  const Task& task() const { return walk_.task(); }
  const Task& partners_task() const { return walk_.partners_task(); }
  TokenRange tokens() const { return walk_.tokens(); }

 private:
  enum class PairRole { kNone, kFirst, kSecond };  // in the list being walked

  void enter_list() {
    const ListKind kind = static_cast<ListKind>(list_);
    in_list_ = true;
    pair_role_ = PairRole::kNone;
    walk_ = {};
    if (!walks_list(*p_, launch_, worker_, role_, kind)) return;
    const bool in_pair = kind == ListKind::kCompute && p_->cluster == 2;
    WalkStyle style = style_;
    style.for_a_pair = in_pair;
    walk_ = ListWalk(*p_, launch_, kind, worker_, style);
    if (in_pair && !walk_.empty()) pair_role_ = worker_ % 2 == 0 ? PairRole::kFirst : PairRole::kSecond;
  }

  void leave_list() {
    pair_role_ = PairRole::kNone;
    in_list_ = false;
    ++list_;
  }

  const RankProgram* p_;
  int32_t worker_;
  AgentRole role_;
  WalkStyle style_;
  int32_t launch_ = 0;
  int32_t list_ = 0;  // the list being walked, or to be entered
  bool in_list_ = false;
  PairRole pair_role_ = PairRole::kNone;
  ListWalk walk_;
};

}  // namespace uniep::program
