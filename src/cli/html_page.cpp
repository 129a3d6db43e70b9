#include "cli/html_page.h"

#include <fmt/format.h>

#include <cstddef>

#include "io/markup.h"

namespace uniep::cli {
namespace {

constexpr const char* kStyle = R"(
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1f24; max-width: 1200px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2.2em; border-bottom: 1px solid #d0d7de; }
h3 { font-size: 1.05em; margin-top: 1.6em; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: .6em 0; }
th, td { text-align: left; padding: .3em 1em .3em 0; vertical-align: top; }
th { border-bottom: 2px solid #d0d7de; } td { border-bottom: 1px solid #eaeef2; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.chosen td { background: #ddf4e4; font-weight: 600; } .note { color: #57606a; }
pre { background: #f6f8fa; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: .8em 0; } figcaption { color: #57606a; } svg { max-width: 100%; height: auto; }
)";

bool is_number(const std::string& text) {
  if (text.empty()) return false;
  const bool has_sign = text.size() > 1 && (text[0] == '-' || text[0] == '+');
  const char first = text[has_sign ? 1 : 0];
  return first >= '0' && first <= '9';
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

}  // namespace

HtmlPage::HtmlPage(const std::string& title) : title_(io::escape_markup(title)) {}

void HtmlPage::element(const char* name, const std::string& attributes, const std::string& text) {
  body_ += fmt::format("<{0}{1}>{2}</{0}>\n", name, attributes, io::escape_markup(text));
}

void HtmlPage::heading(const std::string& text) {
  element("h2", "", text);
}
void HtmlPage::subheading(const std::string& text) {
  element("h3", "", text);
}
void HtmlPage::paragraph(const std::string& text) {
  element("p", "", text);
}
void HtmlPage::note(const std::string& text) {
  element("p", " class=\"note\"", text);
}
void HtmlPage::code(const std::string& text) {
  element("pre", "", text);
}

void HtmlPage::table(const std::vector<std::string>& head, const std::vector<std::vector<std::string>>& rows,
                     int chosen) {
  body_ += "<div class=\"scroll\"><table>\n<tr>";
  for (const std::string& name : head) body_ += "<th>" + io::escape_markup(name) + "</th>";
  body_ += "</tr>\n";
  for (std::size_t row = 0; row < rows.size(); ++row) {
    body_ += static_cast<int>(row) == chosen ? "<tr class=\"chosen\">" : "<tr>";
    for (const std::string& cell : rows[row]) {
      body_ += fmt::format("<td{}>{}</td>", is_number(cell) ? " class=\"number\"" : "", io::escape_markup(cell));
    }
    body_ += "</tr>\n";
  }
  body_ += "</table></div>\n";
}

void HtmlPage::picture(const std::string& svg, const std::string& caption) {
  std::string own = svg;
  const std::string name = fmt::format("wait-{}", ++pictures_);
  replace_all(own, "id=\"wait\"", "id=\"" + name + "\"");
  replace_all(own, "url(#wait)", "url(#" + name + ")");
  body_ += "<figure>\n" + own + "<figcaption>" + io::escape_markup(caption) + "</figcaption></figure>\n";
}

std::string HtmlPage::text() const {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><title>{0}</title>\n<style>{1}</style>"
      "</head>\n<body>\n<h1>{0}</h1>\n{2}</body>\n</html>\n",
      title_, kStyle, body_);
}

}  // namespace uniep::cli
