#include "writable.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "ferry/error.h"

namespace ferry::tools {
namespace {

// The file that a link names is replaced, not the link, also where there is none yet.
std::string replaced_by(const std::string& path) {
    std::error_code unknown;
    const auto file =
        std::filesystem::weakly_canonical(std::filesystem::absolute(behind_links(path)), unknown);
    return unknown ? path : file.string();
}

bool lies_in(const std::string& path, const std::string& directory) {
    const std::filesystem::path file = replaced_by(path), above = replaced_by(directory);
    return std::mismatch(above.begin(), above.end(), file.begin(), file.end()).first == above.end();
}

}  // namespace

void check_writable(const std::string& option, const std::string& path,
                    const Replaceable& replaceable) {
    if (path.empty()) return;
    const std::filesystem::path file(path), parent = file.parent_path();
    const std::string directory = parent.empty() ? "." : parent.string();
    const auto refuse = [&](std::string what, std::string measured,
                            std::string remedy =
                                "name a file in a directory that you may write "
                                "to") {
        throw Error(Trouble::usage, {.what = std::move(what),
                                     .where = option + " " + path,
                                     .measured = std::move(measured),
                                     .remedy = std::move(remedy)});
    };
    if (access(directory.c_str(), W_OK | X_OK) != 0) {
        refuse("nothing can be written there", directory + ": " + std::strerror(errno));
    }
    if (kind_of(directory) != FileKind::directory) refuse("not in a directory", directory);
    const FileKind kind = kind_of(path);
    if (kind != FileKind::none && kind != FileKind::regular) {
        refuse("it would replace something that is no file", path);
    }
    try_draft(option, path, replaceable);
}

void try_draft(const std::string& option, const std::string& path, const Replaceable& replaceable) {
    try {
        const Draft trial(path, "nothing can be written there", option + " " + path, replaceable);
    } catch (const Error& error) {
        throw Error(Trouble::usage, error.problem());
    }
}

void check_differ(const std::string& option, const std::string& path,
                  const std::string& other_option, const std::string& other_path) {
    if (path.empty() || other_path.empty() || replaced_by(path) != replaced_by(other_path)) return;
    throw Error(Trouble::usage, {.what = "two results would go into one file",
                                 .where = option + " " + path,
                                 .measured = other_option + " " + other_path,
                                 .remedy = "give each a file of its own"});
}

void check_outside(const std::string& option, const std::string& path, const std::string& holds,
                   const std::string& directory) {
    if (path.empty() || directory.empty() || !lies_in(path, directory)) return;
    throw Error(Trouble::usage, {.what = "it would be among the files of " + holds,
                                 .where = option + " " + path,
                                 .measured = directory,
                                 .remedy = "name a file elsewhere"});
}

void check_no_volume(const std::string& option, const std::string& path,
                     std::span<const NvmePath> volumes) {
    if (path.empty()) return;
    const std::string name = std::filesystem::path(replaced_by(path)).filename();
    if (name != "ferry.volume" && !name.starts_with("ferry.slots")) return;
    for (const NvmePath& volume : volumes) {
        if (!lies_in(path, volume.path)) continue;
        throw Error(Trouble::usage,
                    {.what = "it would be one of the run's own files in "
                             "budgets.nvme, which go with the run",
                     .where = option + " " + path,
                     .measured = name,
                     .limit = "no ferry.volume and no ferry.slots... in " + volume.path,
                     .remedy = "give it another name, or name a file elsewhere"});
    }
}

void write_whole(const std::string& option, const std::string& path, const std::string& text,
                 const Replaceable& replaceable) {
    Draft file(path, "the file cannot be written", option + " " + path, replaceable);
    file.write(text);
    file.publish();
}

}  // namespace ferry::tools
