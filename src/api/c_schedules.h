#pragma once

#include <string>
#include <vector>

#include "uniep/uniep.h"

namespace uniep {

// What the schedule texts of a group have resolved to, so that a repeated text is not parsed and checked again.
class ResolvedSchedules {
 public:
  // Throws Error(kInvalidArgument). The reference holds until the next call.
  const Schedule& find(const char* text, Direction direction, Operation operation, const LayerConfig& layer,
                       const Machine& machine);

 private:
  struct Known {
    std::string text;
    Direction direction;
    Operation operation;
    LayerConfig layer;
    Schedule schedule;
  };
  static constexpr std::size_t kMax = 64;  // the text found longest ago makes room

  std::vector<Known> known_;  // the text found last is the last
};

}  // namespace uniep
