#include <cerrno>
#include <cstdio>
#include <cstring>

#include "commands.h"
#include "ferry/error.h"

void check_output() {
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
    throw ferry::Error(ferry::Trouble::io,
                       {.what = "what ferry printed could not be written",
                        .where = "standard output",
                        .measured = std::strerror(errno),
                        .remedy = "free space where it goes, or let its reader live longer"});
}
