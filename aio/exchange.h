// The files of an ended run give way to those of a new one, in one directory. A kill or a power
// failure at any moment leaves the state of the one or of the other whole:
//
//   1. stage():       the new files, which had no name, get one beside the old files, and so does
//                     their header (ferry.next). On all paths of a volume before
//   2.                the header is written in the old one's place: now the new state counts
//   3. take_names():  the new files get the old ones' names; what is left of the old goes
//
// Whoever comes after a kill finds ferry.next, and goes on from 3 where any path of the volume came
// to 2. Else what is staged is of no use, and goes when the path is taken for a new run.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "header.h"

namespace ferry::aio {

// What a new run holds of a directory until then: opened at its start, as at its first record a
// process at its limit could open nothing.
struct Nameless {
    int directory = -1;
    int header = -1;  // by O_TMPFILE, like the slot files
};
// Throws Error; unstage() then removes what was made.
void stage(const std::string& path, const Nameless& opened, std::span<const int> slot_files,
           const Header& header);
// The header of staged files, where it is whole.
std::optional<Header> staged(const std::string& path);
// Of a volume's `files`, those that still have their staged names. Again after a kill, too.
void take_names(const std::string& path, int files, int directory = -1);
void unstage(const std::string& path) noexcept;

// Names an open file that has no name. Throws Error.
void give_name(int file, const std::string& name);
// Removes a slot file; what is no plain file of that name stays. Its space is free at once, even
// while the ring of a killed process still lets go of it. 0, or why it could not be opened.
int remove_plain_file(const std::string& name) noexcept;
// The same where a process at its limit may open nothing more.
void remove_plain_file_unopened(const std::string& name) noexcept;
// The names in a directory are on stable storage at return. Throws Error.
void flush_names(const std::string& path, int directory = -1);

}  // namespace ferry::aio
