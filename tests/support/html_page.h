#pragma once

#include <string>

namespace uniep::test {

int count(const std::string& text, const std::string& part);

// Expects of an HTML page that every tag that opens is closed in turn, that nothing can be fetched, and that no name is
// there twice.
void expect_whole(const std::string& page);

}  // namespace uniep::test
