#pragma once

// Programs are no part of the public namespace; the library's own code names them as if they were.
namespace uniep {

namespace program {}
using namespace program;

}  // namespace uniep
