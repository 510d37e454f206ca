// A directory of a test's own, gone afterwards with all that is in it.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace ferry {

class TemporaryDirectory {
public:
    explicit TemporaryDirectory(const std::string& parent = "/var/tmp")
        : path_(parent + "/ferry-test-XXXXXX") {
        if (!mkdtemp(path_.data())) throw std::runtime_error("no directory in " + parent);
    }
    ~TemporaryDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

    const std::string& path() const { return path_; }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    bool has(const std::string& name) const { return std::filesystem::exists(*this / name); }
    bool empty() const { return std::filesystem::is_empty(path_); }
    void put(const std::string& name, std::string_view contents) const {
        std::ofstream(*this / name) << contents;
    }
    std::string contents(const std::string& name) const {
        std::ifstream file(*this / name);
        return {std::istreambuf_iterator<char>(file), {}};
    }

private:
    std::string path_;
};

}  // namespace ferry
