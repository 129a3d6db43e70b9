#pragma once

// CLI11 takes seconds to compile wherever it is included: for headers, its names are enough.
namespace CLI {
class App;
class Option;
}  // namespace CLI
