// Directories of a benchmark's own: <path>/<name>, made and removed again, so that nothing else at
// the path is touched. A child process outlives a benchmark that is killed and removes them then;
// what is left there even so, the next benchmark removes first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ferry::tools {

// Whose the volumes in there are. A run's id is a hash; what a killed run left, its durable state
// above all, is no benchmark's to remove.
constexpr uint64_t kBenchRun = 0;

// The bytes that a benchmark wants for its files on each path.
struct FileBytes {
    int64_t least = 0, most = 0;
    std::string remedy = "free some space";  // where there is less than the least
};

class IoSites {
public:
    // Locks them for its life. Throws usage where a path is no directory that can be written to, is
    // given twice, is measured by another process, or holds files that are no benchmark's.
    explicit IoSites(const std::vector<std::string>& paths,
                     const std::string& name = "ferry-bench");
    ~IoSites();
    IoSites(const IoSites&) = delete;
    IoSites& operator=(const IoSites&) = delete;

    const std::vector<std::string>& directories() const noexcept { return directories_; }
    // The bytes that each path can give of that, a multiple of `step`. A twentieth of the file
    // system, or 1 GiB, stays free. Paths on one file system share its room. Throws does_not_fit.
    int64_t bytes_per_path(const FileBytes& wanted, int64_t step) const;

private:
    bool lock_directory(const std::string& path, const std::string& directory, bool& made);
    void open_directory(const std::string& path, const std::string& name);
    void remove_leftovers(const std::string& directory);
    void remove_directories() noexcept;
    void start_caretaker();
    [[noreturn]] void take_care(int lifeline) noexcept;
    void dismiss_caretaker() noexcept;

    std::vector<std::string> directories_{};
    std::vector<std::string> ours_{};  // directories that this made, or a killed benchmark left
    std::vector<int> locks_{};
    int caretaker_ = -1;  // its process
    int lifeline_ = -1;   // the write end of a pipe, closed by this process's end
};

// The name that a path is known by: absolute, without "." and "..", without a slash at its end.
std::string absolute_path(const std::string& path);

// "ext4", "tmpfs", "xfs", ... or the number of an unknown one.
std::string file_system_of(const std::string& path);
constexpr const char* kTmpfs = "tmpfs";

}  // namespace ferry::tools
