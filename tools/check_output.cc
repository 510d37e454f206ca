#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "commands.h"
#include "ferry/error.h"

void check_output() {
    const bool flushed = std::fflush(stdout) == 0;
    const int error = errno;
    if (!flushed) throw output_error(std::strerror(error));
    if (output_failed()) throw output_error("an earlier part was lost");
}

bool output_failed() { return std::ferror(stdout) != 0; }

ferry::Error output_error(std::string reason) {
    return {ferry::Trouble::io,
            {.what = "what ferry printed could not be written",
             .where = "standard output",
             .measured = std::move(reason),
             .remedy = "free space where it goes, or let its reader live longer"}};
}
