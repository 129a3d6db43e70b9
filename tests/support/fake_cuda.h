#pragma once

#include <cuda.h>

// A stand-in for the CUDA driver and NVRTC (libfake_cuda.so, for UNIEP_LIBCUDA and UNIEP_LIBNVRTC). Kernels do nothing:
// "device" memory is the host's, allocations that processes share are memfds, and work is done at once. Calls fail or
// stall where the environment says so:
//   FAKE_CUDA_FAIL="cuMemCreate:2:2"     the second cuMemCreate of this process returns CUresult 2
//   FAKE_CUDA_FAIL="request:7:2"         so does the seventh call that takes memory, an event, a stream or a module
//   FAKE_CUDA_FAIL="request:+7:2"        the seventh from now on
//   FAKE_CUDA_FAIL="one launch:3:1"      a wait runs out in the third call whose layer is one launch
//   FAKE_CUDA_FAIL="checksum:3:1"        the third array's checksum is another than its bytes'
//   FAKE_CUDA_LAUNCH_US=300              a launch takes 300 microseconds
//   FAKE_CUDA_STALL="cuMemMap:3"         the third cuMemMap of this process does not return
//   FAKE_CUDA_BUSY=1                     events and streams are never done
// It is read at each call, so that a test sets it when it likes; the count is from the last fake_cuda_reset().
extern "C" {
// Of this process: allocations that are not released, address ranges that are not freed, mappings that are not undone,
// streams and events that are not destroyed; 0 if nothing has leaked.
int fake_cuda_live();
void fake_cuda_reset();
// Calls so far that have failed as planned.
int fake_cuda_failures();
// Kernels that were launched since an event was recorded last.
int fake_cuda_kernels_behind_events();
// Of the last launch of a layer: its CTAs, column tiles of its first GEMM, and whether it was cooperative.
int fake_cuda_layer_ctas();
int fake_cuda_layer_first_tiles();
int fake_cuda_layer_is_cooperative();
// Modules that are loaded, which are a process's for good.
int fake_cuda_modules();
// From now on a placement counts as many slots for every expert, or none at all. For ranks of one process.
void fake_cuda_deal_evenly(int deal);
// The next call's kernels say that a wait of theirs ran out, on its first rank.
void fake_cuda_fail_call();
// The last call's kernels say so by now.
void fake_cuda_fail_last_call();
// They say so while the next placement counts.
void fake_cuda_fail_last_call_in_place();
// What kernels of the last placement found wrong, a PlaceFault, told behind place(): rank 1 is at fault.
void fake_cuda_fail_last_place(int fault);
// Launches of a kernel, by its name, since the last reset; and kernels that were looked up behind the first layer's.
int fake_cuda_launches(const char* name);
int fake_cuda_lookups_behind_launch();
// Functions that are looked up from now on spill so many bytes.
void fake_cuda_spill(int bytes);
// From now on all streams are captured into a graph, or none; and graphs are replayed, or not: cuCtxSynchronize waits.
void fake_cuda_capture(int capture);
void fake_cuda_replay(int replay);
// From now on the compiler begins, and ends only once this is false again; and fails, or not.
void fake_nvrtc_hold(int hold);
void fake_nvrtc_fail(int fail);
// Compilations that have begun.
int fake_nvrtc_begun();
}
