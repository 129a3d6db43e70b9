// What {fmt} would leave to its library, compiled once for all files that include its headers: it took two thirds of
// the time of each. Weak symbols, as of its header-only form, so that a program may link {fmt}'s own library, too.
#define FMT_HEADER_ONLY 1
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <string>

#if FMT_VERSION >= 90000 && FMT_VERSION < 100000  // others: header-only, cmake/third_party.cmake

namespace uniep {

// Named, so that the compiler keeps them. One that is missing here does not link where it is used.
struct KeptFmtFunctions {
  std::string (*format)(fmt::string_view, fmt::format_args);
  void (*print)(fmt::string_view, fmt::format_args);
  void (*print_to)(std::FILE*, fmt::string_view, fmt::format_args);
  decltype(&fmt::detail::throw_format_error) throw_format_error;
  decltype(&fmt::detail::assert_fail) assert_fail;
  bool (*is_printable)(std::uint32_t);
  decltype(&fmt::detail::thousands_sep_impl<char>) thousands_separator;
  decltype(&fmt::detail::decimal_point_impl<char>) decimal_point;
};

[[gnu::used]] const KeptFmtFunctions kept_fmt_functions = {
    &fmt::vformat,
    &fmt::vprint,
    &fmt::vprint,
    &fmt::detail::throw_format_error,
    &fmt::detail::assert_fail,
    &fmt::detail::is_printable,
    &fmt::detail::thousands_sep_impl<char>,
    &fmt::detail::decimal_point_impl<char>,
};

}  // namespace uniep

#endif
