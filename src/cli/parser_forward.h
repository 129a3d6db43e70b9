#pragma once

// CLI11 takes seconds to compile wherever it is included: for headers, its names are enough.
namespace CLI {  // NOLINT(readability-identifier-naming): that of CLI11
class App;
class Option;
}  // namespace CLI
