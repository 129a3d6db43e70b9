#include "program/recompute.h"

#include "program/schedule_fields.h"

namespace uniep::program {
namespace {

// What decides which rows travel how, and which workers are left alone or lent.
constexpr FieldId kTaken[] = {kDispatchTransport, kDispatchDedup, kCommReserveSms, kCommLendSms};

}  // namespace

Schedule recompute_schedule(const Schedule& backward, const ScheduleRequest& request) {
  PartialSchedule given;
  given.set("fusion", backward.fusion == Fusion::kNone ? "none" : "pairs");
  for (const FieldId field : kTaken) {
    const FieldDescriptor& descriptor = descriptor_of(field);
    given.set(descriptor.field.name, value_text(descriptor.field, descriptor.get(backward).value()));
  }
  ScheduleRequest forward = request;
  forward.direction = Direction::kForward;
  return resolve(given, forward);
}

}  // namespace uniep::program
