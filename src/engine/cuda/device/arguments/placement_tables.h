#pragma once

#include "model/row_table.h"
#include "program/table_list.h"

// One rank's placement in device memory: the tables that RankProgram points to.
namespace uniep::cuda {

constexpr int kMaxPlaceExperts = 2048;  // the placement kernel keeps twenty numbers an expert in shared memory

// From the routing alone.
struct PlacementTables {
#define UNIEP_TABLE(type, name, entries) type* name;
  UNIEP_PLACEMENT_TABLES(UNIEP_TABLE)
  // kWhole; 0 once the placement has failed on this rank: then no table means anything; or kEmptied.
  uint32_t* whole;
};
constexpr uint32_t kWhole = 0xffffffffu;
constexpr uint32_t kEmptied = 2;  // a routing is not legal or does not fit, so that there are no rows

// From the placement and a Schedule.
struct ProgramTables {
  UNIEP_SCHEDULE_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
};

}  // namespace uniep::cuda
