// Whether a file of text is JSON, whose braces and keys nobody means to train on.
#pragma once

#include <string>

namespace ferry::tools {

// Looks at the beginning of a regular file; false for anything else.
bool looks_like_json(const std::string& path);

}  // namespace ferry::tools
