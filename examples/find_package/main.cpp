#include <cstdio>

#include "uniep/uniep.h"

// Prints the Schedule that UniEP chooses for a layer on four ranks, and shows that an error arrives as one.
int main() {
  uniep::GroupOptions options;
  options.ranks = 4;
  const uniep::Group group(options);
  const uniep::LayerShape shape{.hidden = 1024, .intermediate = 512, .experts = 32, .topk = 4};
  const uniep::Schedule schedule =
      uniep::resolve(uniep::PartialSchedule::parse("auto"),
                     {.direction = uniep::Direction::kForward, .shape = shape, .machine = group.machine()});
  std::printf("UniEP %s: %s\n", UNIEP_VERSION_STRING, uniep::to_text(schedule).c_str());
  try {
    uniep::PartialSchedule::parse("fusion=all");
    return 1;
  } catch (const uniep::Error& error) {
    std::printf("%s: %s\n", uniep::status_name(error.status()), error.what());
    return error.status() == uniep::Status::kInvalidArgument ? 0 : 1;
  }
}
