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
  uint32_t* whole;  // 0 once the placement has failed on this rank: then no table means anything
};

// From the placement and a Schedule.
struct ProgramTables {
  UNIEP_SCHEDULE_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
};

}  // namespace uniep::cuda
