// In place of bench_exchange.cpp where the library was built without CUDA's headers.
#include "cli/bench_operation.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

BenchReport refuse(const BenchRequest&) {
  throw Error(Status::kUnsupported, "this build of uniep has no cuda engine (it was built without cuda.h)");
}

}  // namespace

BenchOperation dispatch_operation() {
  return {"dispatch", "rows to their experts", {}, refuse};
}

BenchOperation combine_operation() {
  return {"combine", "expert rows back to their tokens", {}, refuse};
}

}  // namespace uniep::cli
