#pragma once

#include "tests/cuda/backward_batch.h"

// Tests of backward's memory: where, when and on which stream it goes back, and how much it is.
namespace uniep::cuda::test {

// Gradients that another stream makes late, of works and a Saved that nobody holds any more, while the layer's streams
// run calls of the same size.
void run_aside(const Where& where, Results& results);
// A Saved that another stream has read for a work goes back on the layer's stream, which uses it after that.
void run_release(const Where& where, Results& results);
// Every call asks for what memory_need() says, keeps what that says, and gives it back.
void run_memory(const Where& where, Results& results);
// All memory given by the calls' arguments: the allocator is asked for nothing, and the bytes that forward leaves serve
// a backward on another placement of the routing. A forward that keeps nothing gives the same y.
void run_own_memory(const Where& where, Results& results);

}  // namespace uniep::cuda::test
