#include <string>
#include <vector>

#include "api/c_arguments.h"
#include "api/c_handles.h"
#include "api/machine_name.h"
#include "io/cache_folder.h"
#include "io/file.h"
#include "io/quote.h"
#include "tune/online_candidates.h"
#include "tune/tuned.h"

namespace uniep {
namespace {

std::vector<tune::TunedSchedule> entries_of(const char* file) {
  if (file == nullptr) return tune::TunedFolder(cache_folder()).all();
  const std::string text = io::read_text_file(file);
  try {
    return tune::parse_tuned(text);
  } catch (const Error& error) {
    throw Error(error.status(), fmt::format("file: {}: {}", io::quote_path(file), error.what()));
  }
}

bool serves(const tune::TunedSchedule& tuned, const Group& group, const std::string& machine) {
  const tune::TunedKey& key = tuned.key;
  if (key.machine != machine || key.ranks != group.ranks() || !key.conditions.empty()) return false;
  return tune::is_runnable(
      tuned.schedule,
      {.direction = key.direction, .shape = key.shape, .numerics = key.numerics, .machine = group.machine()});
}

}  // namespace
}  // namespace uniep

// The C API's view of what `uniep tune` keeps.
using namespace uniep;

uniep_status uniep_tuned_schedules(const uniep_group* group, const char* file, char* buffer, size_t capacity,
                                   size_t* needed) {
  return guarded([&] {
    require_pointer(group, "group");
    require_pointer(needed, "needed");
    if (capacity > 0) require_pointer(buffer, "buffer");
    std::vector<tune::TunedSchedule> entries = entries_of(file);
    const Group& own = group->state->group;
    const std::string machine = api::machine_name(own);
    std::erase_if(entries, [&](const auto& tuned) { return !serves(tuned, own, machine); });
    put_text(tune::to_json(entries), "the schedules need", buffer, capacity, needed);
  });
}
