// Whether a file can be written, asked before the work whose result it is to hold.
#pragma once

#include <span>
#include <string>

#include "base/files.h"
#include "ferry/config.h"

namespace ferry::tools {

// Before a run, not after it: what can be known then must not cost its results. Nothing is replaced
// but an older file of the same kind, as `replaceable` tells. An empty path is no file. Throws
// usage, naming the option.
void check_writable(const std::string& option, const std::string& path,
                    const Replaceable& replaceable);
// That a draft can be made there and may have the file's name. A directory may be writable by its
// mode and still take no file, as in /proc. Throws usage.
void try_draft(const std::string& option, const std::string& path,
               const Replaceable& replaceable = {});
// Refuses two options whose files would replace each other, by whatever names.
void check_differ(const std::string& option, const std::string& path,
                  const std::string& other_option, const std::string& other_path);

// That a file lies neither in a directory nor below it, by whatever names: what is there is
// `holds`, "the model that is trained". Empty paths are none.
void check_outside(const std::string& option, const std::string& path, const std::string& holds,
                   const std::string& directory);

// That a file is none of those which a run makes, and removes, in these directories or below them.
void check_no_volume(const std::string& option, const std::string& path,
                     std::span<const NvmePath> volumes);

// Writes a draft beside the file and puts it in the file's place when it is whole on disk: what was
// there stays until then. Throws io, naming the option.
void write_whole(const std::string& option, const std::string& path, const std::string& text,
                 const Replaceable& replaceable = {});

}  // namespace ferry::tools
