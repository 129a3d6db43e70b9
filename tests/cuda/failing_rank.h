#pragma once

#include <atomic>
#include <cstdint>

#include "engine/cuda/device/arguments/signals.h"

// What the ranks of gpu_failure_tests do, each in a process of its own, and what they and the test tell each other.
namespace uniep::cuda::test {

constexpr double kWaitLimit = 2, kArrivalLimit = 4;

enum class RankPhase : int {
  kMeeting = 0,
  kConstructor,
  kPlaceByNeed,
  kPlaceWithin,
  kGrowingPlace,
  kForward,
  kGrowingForward,
  kBackward,
  kWeightGradients,
  kGather,
  kRecover,
  kDestructor,
};
constexpr int kRankPhases = 12;
const char* phase_name(RankPhase phase);

// How a rank fails by itself.
enum class RankFault : int {
  kNone = 0,
  kOutOfMemory,       // the caller's allocator has none
  kLeave,             // Group::leave()
  kPlaceArgument,     // no ids
  kForwardArgument,   // an address that is not aligned
  kException,         // the caller throws between place() and forward()
  kBackwardArgument,  // an address that is not aligned
  kBackwardOutOfMemory,
  kExceptionAfterBackward,         // its weight gradients are not made
  kExceptionAfterWeightGradients,  // the others hear of it in their next call
  // It stays in the group, and the others' GPUs come to the call only behind what it does next:
  kRefusesAndGoesOn,  // an address that is not aligned; then a forward that is right
  kRefusesTwice,      // two in a row
};
constexpr int kRankFaults = 9;  // but kNone and those of a rank that stays
constexpr int kStayingFaults = 2;
inline bool stays(RankFault fault) {
  return fault >= RankFault::kRefusesAndGoesOn;
}
const char* fault_name(RankFault fault);

// One rank's words. A meeting is a Group with long limits that runs one layer; between two of them ranks make calls on
// Groups with short limits until one of them fails.
struct RankWords {
  std::atomic<int64_t> met;      // the last meeting
  std::atomic<int64_t> ended;    // the last meeting behind which the calls ended in an error
  std::atomic<int64_t> step;     // calls behind the meeting
  std::atomic<int> phase;        // RankPhase of that call
  std::atomic<uint64_t> result;  // checksum of y and gradients at the first meeting
  std::atomic<int> wrong;        // meetings with another one
  // The error, written before `ended`.
  double error_at;
  int status;  // of uniep::Error; -1: another exception
  char text[600];
};

struct FailureBoard {
  std::atomic<int64_t> plan;  // the meeting that the plan is for
  std::atomic<int> victim;
  std::atomic<int> fault;        // RankFault
  std::atomic<int64_t> at_step;  // that the fault comes at, or soon behind
  std::atomic<double> acted_at;  // 0: not yet
  RankWords rank[kMaxCudaRanks];
};

// A rank's process from this meeting on; returns its exit status.
int run_failing_rank(int rank, int ranks, int board, int64_t meeting);

}  // namespace uniep::cuda::test
