#pragma once

#include <vector>

#include "uniep/schedule.h"

namespace uniep::tune {

// Legal Schedules that differ from a legal one in one field that was not given, nor is the caller's (save.*,
// comm.lend_sms), and from each other; of each field its values in turn, those next to the Schedule's own first, until
// there are `most`.
std::vector<Schedule> neighbours(const Schedule& schedule, const PartialSchedule& given, const ScheduleRequest& request,
                                 std::size_t most);

}  // namespace uniep::tune
