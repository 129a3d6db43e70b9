// What {fmt} would leave to its library, compiled once for all files that include its headers: it took two thirds of
// the time of each. Weak, as inline functions are, so that a program may link {fmt}'s own library, too.
#include <fmt/format.h>

#if FMT_VERSION >= 90000 && FMT_VERSION < 100000  // others: header-only, cmake/third_party.cmake

#undef FMT_FUNC
#define FMT_FUNC __attribute__((weak))
#include <fmt/format-inl.h>

namespace fmt::detail {

template auto thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template auto decimal_point_impl<char>(locale_ref) -> char;

}  // namespace fmt::detail

#endif
