#include "io/safetensors_header.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/extents.h"
#include "io/quote.h"
#include "uniep/error.h"

namespace uniep::io {
namespace {

using nlohmann::json;

// Takes the header as a stream of events and refuses at once what does not belong there, so that a hostile header is
// never built as a tree, and duplicate keys are seen.
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  explicit HeaderReader(const std::string& where) : where_(where) {}

  SafetensorsHeader take() && { return std::move(header_); }

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { unexpected("a fraction or a number above 64 bits"); }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kNumbers) unexpected("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) unexpected("a number above 63 bits");
    if (numbers_->size() == kMaxDimensions) unexpected("more than " + std::to_string(kMaxDimensions) + " numbers");
    numbers_->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata[key_] = std::move(value);
    } else if (place_ == Place::kTensor && key_ == "dtype") {
      entry_->dtype = std::move(value);
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kTensors;
    } else if (place_ == Place::kTensors && name_ == kMetadataKey) {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kTensors) {
      entry_ = &header_.tensors[name_];
      place_ = Place::kTensor;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    if (place_ == Place::kTensors) {
      const bool metadata = value == kMetadataKey;
      if (metadata ? std::exchange(metadata_seen_, true) : header_.tensors.contains(value)) duplicate(value);
      name_ = std::move(value);
      key_.clear();
      return true;
    }
    if (place_ == Place::kMetadata) {
      if (header_.metadata.contains(value)) duplicate(value);
    } else if (value == "dtype") {
      if (entry_->dtype) duplicate(value);
    } else if (value == "shape") {
      if (entry_->shape) duplicate(value);
    } else if (value == "data_offsets") {
      if (entry_->data_offsets) duplicate(value);
    } else {
      unexpected("the unknown key " + quote_text(value));
    }
    key_ = std::move(value);
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      if (!entry_->dtype || !entry_->shape || !entry_->data_offsets) {
        fail("tensor " + quote_text(name_) + " lacks one of dtype, shape and data_offsets");
      }
      if (entry_->data_offsets->size() != 2) fail("tensor " + quote_text(name_) + ": data_offsets must be two numbers");
    }
    place_ = place_ == Place::kTensors ? Place::kEnd : Place::kTensors;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || key_ == "dtype") unexpected("an array");
    std::optional<std::vector<int64_t>>& field = key_ == "shape" ? entry_->shape : entry_->data_offsets;
    numbers_ = &field.emplace();
    place_ = Place::kNumbers;
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    fail("the header is not valid JSON at byte " + std::to_string(position) + " of it");
  }

 private:
  enum class Place { kStart, kTensors, kMetadata, kTensor, kNumbers, kEnd };

  [[noreturn]] void fail(const std::string& problem) const {
    throw Error(Status::kInvalidArgument, where_ + ": " + problem);
  }

  [[noreturn]] void duplicate(const std::string& value) const {
    fail("the key " + quote_text(value) + " stands twice in one object of the header");
  }

  [[noreturn]] void unexpected(const std::string& what) const {
    if (place_ == Place::kStart) fail("the header is not a JSON object");
    std::string at = name_.empty() && key_.empty() ? "" : " in " + quote_text(name_);
    if (!key_.empty()) at += " at " + quote_text(key_);
    fail("the header has " + what + at + ", where the format allows none");
  }

  const std::string& where_;
  SafetensorsHeader header_;
  Place place_ = Place::kStart;
  std::string name_;  // the key in the outer object
  std::string key_;   // the key in the inner one
  bool metadata_seen_ = false;
  SafetensorsEntry* entry_ = nullptr;        // while in kTensor and kNumbers
  std::vector<int64_t>* numbers_ = nullptr;  // while in kNumbers
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& where) {
  // The JSON parser would skip a byte order mark and leading spaces; the format begins with the brace.
  if (!text.starts_with('{')) throw Error(Status::kInvalidArgument, where + ": the header does not begin with '{'");
  // Nor would it look beyond a zero byte after the last brace.
  if (text.find('\0') != std::string_view::npos) {
    throw Error(Status::kInvalidArgument, where + ": the header is not valid JSON: it has a zero byte");
  }
  HeaderReader reader(where);
  json::sax_parse(text.begin(), text.end(), &reader);
  return std::move(reader).take();
}

}  // namespace uniep::io
