#include "support/html_page.h"

#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <vector>

namespace uniep::test {

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

void expect_whole(const std::string& page) {
  std::vector<std::string> open;
  std::set<std::string> ids;
  const std::regex tag("<(/?)([a-zA-Z0-9]+)([^<>]*?)(/?)>");
  for (auto at = std::sregex_iterator(page.begin(), page.end(), tag); at != std::sregex_iterator(); ++at) {
    const std::string name = (*at)[2], attributes = (*at)[3];
    EXPECT_EQ(std::set<std::string>({"script", "link", "img", "iframe", "object", "use"}).count(name), 0u) << name;
    EXPECT_EQ(attributes.find("href"), std::string::npos) << attributes;
    EXPECT_EQ(attributes.find("src="), std::string::npos) << attributes;
    std::smatch id;
    if (std::regex_search(attributes, id, std::regex(" id=\"([^\"]*)\""))) {
      EXPECT_TRUE(ids.insert(id[1]).second) << id[1];
    }
    if (name == "meta" || (*at)[4].length() > 0) continue;
    if ((*at)[1].length() == 0) {
      open.push_back(name);
      continue;
    }
    ASSERT_FALSE(open.empty()) << name;
    EXPECT_EQ(open.back(), name);
    open.pop_back();
  }
  EXPECT_TRUE(open.empty()) << open.back();
  for (const char* outside : {"@import", "url(http", "url(/", "javascript:"}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
  const std::regex used("url\\(#([a-z0-9-]+)\\)");
  for (auto at = std::sregex_iterator(page.begin(), page.end(), used); at != std::sregex_iterator(); ++at) {
    EXPECT_TRUE(ids.count((*at)[1])) << (*at)[1];
  }
}

}  // namespace uniep::test
