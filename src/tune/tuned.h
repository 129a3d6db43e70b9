#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "uniep/direction.h"
#include "uniep/numerics.h"
#include "uniep/schedule.h"
#include "uniep/shape.h"

// What measuring found, and where it is kept: a file an entry in a folder, and one file of many entries that goes from
// machine to machine. JSON: {"format": 2, "schedules": [{"machine": ..., "shape": ..., ..., "schedule": {...}}]}.
namespace uniep::tune {

// What a Schedule's speed depends on.
struct TunedKey {
  std::string machine;  // engine, device, compute units, launch, and library_label()
  int ranks = 1;
  LayerShape shape;
  Numerics numerics;
  Direction direction = Direction::kForward;
  int64_t tokens = 0;      // token_bucket() of the largest T of any rank
  std::string conditions;  // a routing that is not uniform, and fields that were given; empty: neither
  bool operator==(const TunedKey&) const = default;
};

// Whether a TunedKey::machine can be kept.
bool is_utf8(const std::string& text);

// TunedKey::conditions of uniform routing.
std::string conditions_of(const PartialSchedule& given);

// What a layer's entry may be kept under: the key itself, else the one without conditions.
std::vector<TunedKey> keys_of(const TunedKey& key);

// Batches of about a size share an entry: up to 4096 tokens the next power of two, above it the next multiple of 4096.
int64_t token_bucket(int64_t tokens);

struct TunedSchedule {
  TunedKey key;
  Schedule schedule;
  double milliseconds = 0, default_milliseconds = 0;  // medians of one measurement
  bool operator==(const TunedSchedule&) const = default;
};

// Throws Error(kInvalidArgument) that says which entry and which field is wrong, and what is legal.
std::vector<TunedSchedule> parse_tuned(std::string_view text);
std::string to_json(const std::vector<TunedSchedule>& schedules);

// One file an entry, whole or not there, so processes may share the folder.
class TunedFolder {
 public:
  // Empty: nothing is kept and nothing is found.
  explicit TunedFolder(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // None where there is no entry, and where its file can not be read, is damaged, or is of another version: `problem`
  // then has one line that says so. It is never deleted.
  std::optional<TunedSchedule> find(const TunedKey& key, std::string* problem = nullptr) const;
  // Every entry that can be read.
  std::vector<TunedSchedule> all() const;
  // Throws Error(kIo).
  void store(const TunedSchedule& tuned) const;
  void remove(const TunedKey& key) const;
  bool keeps() const { return !folder_.empty(); }
  std::filesystem::path path(const TunedKey& key) const;
  const std::filesystem::path& path() const { return folder_; }

 private:
  std::filesystem::path folder_;
};

}  // namespace uniep::tune
