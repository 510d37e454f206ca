#include "output.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/text.h"

namespace ferry::tools {
namespace {

int g_lost = 0;  // errno of the first part that could not be written
bool g_told = false;

// Not again: what follows a gap would be taken for all.
bool is_lost() { return g_lost != 0 || output_failed(); }

void note(bool written, int error) {
    if (!written && g_lost == 0) g_lost = error;
}

bool flush() {
    if (is_lost()) return false;
    errno = 0;
    const bool written = std::fflush(stdout) == 0;
    note(written, errno);
    return written;
}

std::string why() { return g_lost != 0 ? std::strerror(g_lost) : "an earlier part was lost"; }

}  // namespace

void print_text(std::string_view text) {
    if (is_lost()) return;
    const std::string shown = printable(text);
    errno = 0;
    const bool written = std::fwrite(shown.data(), 1, shown.size(), stdout) == shown.size();
    note(written, errno);
}

void flush_output() {
    if (flush() || g_told) return;
    g_told = true;
    log_warn("standard output: " + why() + ": nothing more is printed; the work goes on");
}

void check_output() {
    if (!flush()) throw output_error(why());
}

bool output_failed() { return std::ferror(stdout) != 0; }

Error output_error(std::string reason) {
    return {Trouble::io,
            {.what = "what ferry printed could not be written",
             .where = "standard output",
             .measured = std::move(reason),
             .remedy = "free space where it goes, or let its reader live longer"}};
}

}  // namespace ferry::tools
