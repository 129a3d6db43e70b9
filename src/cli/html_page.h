#pragma once

#include <string>
#include <vector>

namespace uniep::cli {

// One HTML file with nothing outside of it: no script, font, picture or style is fetched.
class HtmlPage {
 public:
  explicit HtmlPage(const std::string& title);

  void heading(const std::string& text);
  void subheading(const std::string& text);
  void paragraph(const std::string& text);
  void note(const std::string& text);
  // Text that keeps its lines, and can be copied.
  void code(const std::string& text);
  // A cell that begins with a digit or a sign is set to the right. `chosen` is the row that is emphasized, or -1.
  void table(const std::vector<std::string>& head, const std::vector<std::vector<std::string>>& rows, int chosen = -1);
  // An SVG document, with what it defines renamed so that several fit into one page.
  void picture(const std::string& svg, const std::string& caption);

  std::string text() const;

 private:
  void element(const char* name, const std::string& attributes, const std::string& text);

  std::string body_;
  std::string title_;
  int pictures_ = 0;
};

}  // namespace uniep::cli
