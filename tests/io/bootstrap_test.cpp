// How the processes of a group agree on a name: torchrun's environment and unique ids.
#include "comm/bootstrap.h"

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
  EXPECT_NE(environment->name.find("10.0.0.7 29500"), std::string::npos) << environment->name;
}

TEST(RankEnvironment, ThereIsNoneWithoutRankAndWorldSize) {
  const ScopedRankVariables variables({{"LOCAL_RANK", "0"}, {"MASTER_PORT", "1"}});
  EXPECT_FALSE(rank_environment().has_value());
}

TEST(RankEnvironment, JobsHaveDifferentNamesAndRanksTheSame) {
  const auto name_with = [](const char* variable, const char* value) {
    Variables given = kSecondOfFour;
    given[variable] = value;
    const ScopedRankVariables variables(given);
    return rank_environment()->name;
  };
  const std::string name = name_with("RANK", "1");
  EXPECT_EQ(name_with("RANK", "2"), name);
  EXPECT_EQ(name_with("LOCAL_RANK", "3"), name);
  EXPECT_EQ(name_with("LOCAL_WORLD_SIZE", "4"), name);
  EXPECT_EQ(name_with("NCCL_COMM_ID", "10.0.0.7:1"), name);
  EXPECT_NE(name_with("MASTER_ADDR", "::1"), name);
  EXPECT_NE(name_with("MASTER_PORT", "29501"), name);
  EXPECT_NE(name_with("TORCHELASTIC_RUN_ID", "job"), name);
}

TEST(RankEnvironment, StaysAsItWas) {
  const ScopedRankVariables variables(kSecondOfFour);
  rank_environment();
  EXPECT_EQ(std::getenv("NCCL_COMM_ID"), nullptr);
}

TEST(RankEnvironment, AJobOnSeveralHostsIsRefused) {
  Variables given = kSecondOfFour;
  given["LOCAL_WORLD_SIZE"] = "2";
  const ScopedRankVariables variables(given);
  expect_error(Status::kUnsupported, "WORLD_SIZE: 4 with LOCAL_WORLD_SIZE 2", [] { rank_environment(); });
}

TEST(UniqueId, IsNewEveryTimeAndNamesAGroup) {
  const std::string id = new_unique_id(), other = new_unique_id();
  EXPECT_EQ(id.size(), kUniqueIdBytes);
  EXPECT_NE(id, other);
  EXPECT_EQ(name_of_unique_id(id), name_of_unique_id(id));
  EXPECT_NE(name_of_unique_id(id), name_of_unique_id(other));
  EXPECT_NO_THROW(name_of_unique_id(std::string(128, 'n')));  // of another library
  expect_error(Status::kInvalidArgument, "a unique id of 127 bytes", [] { name_of_unique_id(std::string(127, 'n')); });
}

TEST(UniqueId, OfAnotherHostIsRefused) {
  std::string id = new_unique_id();
  constexpr std::size_t kHostAt = 32;
  id[kHostAt] = static_cast<char>(id[kHostAt] ^ 1);
  expect_error(Status::kUnsupported, "all ranks must be processes of one host", [&] { name_of_unique_id(id); });
}

struct BadVariable {
  const char* name;
  const char* value;  // null: not set
  const char* legal;
};

TEST(RankEnvironment, ABadVariableIsNamedWithItsValueAndWhatIsLegal) {
  const BadVariable cases[] = {
      {"RANK", nullptr, "0 to 3"},       {"RANK", "4", "0 to 3"},          {"RANK", "-1", "0 to 3"},
      {"RANK", "one", "0 to 3"},         {"RANK", "", "0 to 3"},           {"RANK", "1 ", "0 to 3"},
      {"WORLD_SIZE", nullptr, "1 to"},   {"WORLD_SIZE", "0", "1 to"},      {"WORLD_SIZE", "4x", "1 to"},
      {"LOCAL_RANK", nullptr, "0 to 3"}, {"LOCAL_RANK", "9", "0 to 3"},    {"MASTER_PORT", nullptr, "1 to 65535"},
      {"MASTER_PORT", "0", "1 to"},      {"MASTER_PORT", "65536", "1 to"}, {"LOCAL_WORLD_SIZE", "5", "1 to 4"}};
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
