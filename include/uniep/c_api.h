#pragma once

/* The whole C interface, for C and for every language that can call C. Plain C99. A call means what the C++ call of the
 * same name does, and gives the same bits. What holds for all of it stands here and nowhere else:
 *
 * Errors. Every call that can fail returns a uniep_status and leaves what it was to write alone, except that a handle
 * to be made is set to NULL; uniep_last_error() says why, in one line. A null pointer is UNIEP_INVALID_ARGUMENT, except
 * where a field or an argument says that it may be null. Errors come before anything runs, but for UNIEP_TIMEOUT,
 * UNIEP_OVERFLOW and UNIEP_DEVICE, of which a later call may tell. No C++ exception leaves a call.
 *
 * Structures. The first field, `size`, is the caller's sizeof of the structure, and a field that is zero has its
 * default; so write
 *     uniep_routing routing = {.size = sizeof(uniep_routing), .tokens = 128};
 * Later versions only add fields at the end, so that a program built with an older header keeps running, and one built
 * with a newer header is refused (UNIEP_UNSUPPORTED) only where it sets a field that the library does not know. In an
 * array of structures all have the same size. A structure without `size` never changes. Structures, and the
 * structures, texts and arrays of addresses that they point to, are read during the call and not kept.
 *
 * Ranks. `count` is the number of entries of an array with one entry a local rank, in rank order: local_ranks of
 * uniep_group_describe(), else UNIEP_INVALID_ARGUMENT. A `rank` is global. Collective calls are made on all ranks of a
 * group, in one order; others need no peer.
 *
 * Memory. Arrays are row-major and dense, lie on the device of their rank, and stay valid until the rank's stream has
 * passed the call (cpu engine: until the call returns). "bf16" is 16 bits a value, whatever type the caller gives it;
 * `float` is fp32. A `stream` is a cudaStream_t; NULL is the default stream. The call's work is queued there, and
 * its inputs are read and its outputs written in the stream's order. The cpu engine ignores it.
 *
 * Handles belong to the caller, who destroys each once, in any order; NULL is nothing to destroy. But for a timer, a
 * handle keeps what it needs of the others. Calls on one group and its handles come one at a time, from any thread. */

#include "uniep/c_call_timer.h"
#include "uniep/c_error.h"
#include "uniep/c_exchange.h"
#include "uniep/c_group.h"
#include "uniep/c_layer.h"
#include "uniep/c_libraries.h"
#include "uniep/c_trace.h"
#include "uniep/c_tuner.h"
#include "uniep/c_verifier.h"
