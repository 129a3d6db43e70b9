#pragma once

namespace uniep::cpu {

// Faults that tests plant to see that they are caught. kNone outside of tests.
enum class Fault {
  kNone,
  kWrongOffset,       // a dispatched row lands one row too far
  kMissingWait,       // the first GEMM does not wait for its rows
  kSwappedThreshold,  // the second GEMM waits for one column tile where it needs all
  kReorderedSum,      // the combine adds the slots in descending order
  kSkippedPadding,    // padding rows are left as they were
  kStaleEpoch,        // the combine's reader accepts the flag of an earlier call
  kEarlyFlag,         // a combine flag is stored before its data
  kLateProb,          // dprobs are returned after the flag that promises them
  kSilentWorker,      // worker 0 of rank 0 never signals its first GEMM tiles
};

}  // namespace uniep::cpu
