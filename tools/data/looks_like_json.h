// Whether a file of text is JSON, whose braces and keys nobody means to train on.
#pragma once

#include <string>
#include <string_view>

namespace ferry::tools {

// By its name alone, else by how its beginning parses, and by what most lines of it are. Of the
// beginning there must be 64 KiB or more where the file has them.
bool looks_like_json(const std::string& path, std::string_view beginning);

}  // namespace ferry::tools
