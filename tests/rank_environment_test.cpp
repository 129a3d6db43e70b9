#include "comm/rank_environment.h"

#include <gtest/gtest.h>

#include "support/environment.h"
#include "support/expect_error.h"

namespace uniep::test {
namespace {

const Variables kSecondOfFour = {
    {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "29500"}};

TEST(RankEnvironment, IsWhatTheVariablesSay) {
  const ScopedRankVariables variables(kSecondOfFour);
  const std::optional<RankEnvironment> environment = rank_environment();
  ASSERT_TRUE(environment.has_value());
  EXPECT_EQ(environment->rank, 1);
  EXPECT_EQ(environment->ranks, 4);
  EXPECT_EQ(environment->local_rank, 1);
  EXPECT_EQ(environment->id, "10.0.0.7:29501");
}

TEST(RankEnvironment, ThereIsNoneWithoutRankAndWorldSize) {
  const ScopedRankVariables variables({{"LOCAL_RANK", "0"}, {"MASTER_PORT", "1"}});
  EXPECT_FALSE(rank_environment().has_value());
}

TEST(RankEnvironment, NcclCommIdStandsForAddressAndPort) {
  const ScopedRankVariables variables(
      {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"NCCL_COMM_ID", "127.0.0.1:4000"}});
  EXPECT_EQ(rank_environment()->id, "127.0.0.1:4000");
}

TEST(RankEnvironment, RanksMeetOnThisMachineUnlessAnAddressIsGiven) {
  Variables given = kSecondOfFour;
  given.erase("MASTER_ADDR");
  const ScopedRankVariables variables(given);
  EXPECT_EQ(rank_environment()->id, "127.0.0.1:29501");
}

struct BadVariable {
  const char* name;
  const char* value;  // null: not set
  const char* legal;
};

TEST(RankEnvironment, ABadVariableIsNamedWithItsValueAndWhatIsLegal) {
  const BadVariable cases[] = {
      {"RANK", nullptr, "0 to 3"},       {"RANK", "4", "0 to 3"},         {"RANK", "-1", "0 to 3"},
      {"RANK", "one", "0 to 3"},         {"RANK", "", "0 to 3"},          {"RANK", "1 ", "0 to 3"},
      {"WORLD_SIZE", nullptr, "1 to"},   {"WORLD_SIZE", "0", "1 to"},     {"WORLD_SIZE", "4x", "1 to"},
      {"LOCAL_RANK", nullptr, "0 to 3"}, {"LOCAL_RANK", "9", "0 to 3"},   {"MASTER_PORT", nullptr, "1 to 65534"},
      {"MASTER_PORT", "0", "1 to"},      {"MASTER_PORT", "65535", "1 to"}};
  for (const BadVariable& bad : cases) {
    Variables given = kSecondOfFour;
    given.erase(bad.name);
    if (bad.value != nullptr) given[bad.name] = bad.value;
    const ScopedRankVariables variables(given);
    const std::string value = bad.value != nullptr ? ": '" + std::string(bad.value) + "'; must be " : ": not set";
    expect_error(Status::kInvalidArgument, bad.name + value, [] { rank_environment(); });
    expect_error(Status::kInvalidArgument, bad.legal, [] { rank_environment(); });
  }
}

}  // namespace
}  // namespace uniep::test
