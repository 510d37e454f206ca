#include "writable.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "ferry/base.h"

namespace ferry::tools {

void check_writable(const std::string& option, const std::string& path, size_t skipped,
                    const std::string& beginning) {
    if (path.empty()) return;
    const std::filesystem::path file(path), parent = file.parent_path();
    const std::string directory = parent.empty() ? "." : parent.string();
    const auto refuse = [&](std::string what, std::string measured) {
        throw Error(Trouble::usage, {.what = std::move(what),
                                     .where = option + " " + path,
                                     .measured = std::move(measured),
                                     .remedy = "name a file in a directory that you may write to"});
    };
    if (access(directory.c_str(), W_OK | X_OK) != 0) {
        refuse("nothing can be written there", directory + ": " + std::strerror(errno));
    }
    if (!std::filesystem::is_directory(directory)) refuse("not in a directory", directory);
    if (std::filesystem::exists(file) && !std::filesystem::is_regular_file(file)) {
        refuse("it would replace something that is no file", path);
    }
    std::ifstream old(path, std::ios::binary);
    std::string start(skipped + beginning.size(), '\0');
    if (old.read(start.data(), static_cast<std::streamsize>(start.size())) &&
        start.substr(skipped) != beginning)
        refuse("it would replace a file of another kind", path);
    // A directory may be writable by its mode and still take no file, as in /proc.
    const std::string trial = path + ".trial";
    if (!std::ofstream(trial)) refuse("nothing can be written there", std::strerror(errno));
    std::filesystem::remove(trial);
}

}  // namespace ferry::tools
