#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>

#include "uniep/error.h"

namespace uniep::test {

// Runs `call`, which must throw Error(status) with one line that holds `text`.
template <class Call>
void expect_error(Status status, const std::string& text, Call&& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one with: " << text;
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.status(), status) << message;
    EXPECT_NE(message.find(text), std::string::npos) << "message: " << message << "\nexpected in it: " << text;
    EXPECT_EQ(message.find('\n'), std::string::npos) << "message: " << message;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a uniep::Error: " << error.what();
  }
}

}  // namespace uniep::test
