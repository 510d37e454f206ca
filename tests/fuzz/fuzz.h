// Every fuzz target gives bytes to a reader, which takes them or throws ferry::Error; anything else
// is a finding. Readers of paths get files in memory.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>

#include "ferry/error.h"

namespace ferry::fuzz {

inline std::string_view text_of(const uint8_t* data, size_t size) {
    return {reinterpret_cast<const char*>(data), size};
}

// An error says something, and is no bug of ferry's. FERRY_FUZZ_SHOW=1 prints it.
template <class Read>
void refused_or_read(const Read& read) {
    try {
        read();
    } catch (const Error& error) {
        static const bool show = getenv("FERRY_FUZZ_SHOW") != nullptr;
        if (show) std::fprintf(stderr, "%s\n", error.what());
        if (error.problem().what.empty() || error.trouble() == Trouble::internal) {
            std::fprintf(stderr, "not a clear error: \"%s\"\n", error.what());
            std::abort();
        }
    }
}

// A directory of this process, gone at its end.
class Directory {
public:
    Directory() {
        setenv("FERRY_LOG", "error", 0);  // a warning for each input would be most of the time
        if (mkdtemp(path_.data()) == nullptr) std::abort();
    }
    ~Directory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    Directory(const Directory&) = delete;
    Directory& operator=(const Directory&) = delete;

    const std::string& path() const { return path_; }
    std::string put(const std::string& name, std::string_view contents) const {
        const std::string file = path_ + "/" + name;
        const int to = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        const bool written = to >= 0 && write(to, contents.data(), contents.size()) ==
                                            static_cast<ssize_t>(contents.size());
        if (!written) std::abort();
        close(to);
        return file;
    }

private:
    std::string path_ = "/dev/shm/ferry-fuzz-XXXXXX";
};

}  // namespace ferry::fuzz
