// The command line around its commands: what is mended before it is read, and what is said of one
// that cannot be.
#pragma once

#include <string>
#include <vector>

#include "ferry/error.h"

namespace CLI {  // NOLINT(readability-identifier-naming): not ours
class App;
class ParseError;
}  // namespace CLI

namespace ferry::tools {

// The words behind the program's name, with "--set a=1 b=2" as "--set a=1 --set b=2". CLI11's own
// way to take several would take the configuration's name too, where that comes behind them: a word
// that names a file, or has no "=", is none of them.
std::vector<std::string> words_of(int count, const char* const* words);

// Refuses "" for every option and argument of all commands: no file, size or name is empty, and
// what is not there means something else.
void refuse_empty(CLI::App& app);

// Says which command, and which word or option is nearest to one that nobody knows.
Error usage_error(const CLI::App& app, const CLI::ParseError& error);

}  // namespace ferry::tools
