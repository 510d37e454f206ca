// Which thread touches a page first, for there the kernel puts it.
#pragma once

#include <algorithm>

#include "ferry/team.h"
#include "ferry/units.h"

namespace ferry::pinned_mem {

// Calls touch(first, size) once for each page of `page_bytes`; the last may be shorter. Pages go to
// the nodes in turn, each to a thread of its node's team, and all nodes work at the same time.
template <class Touch>
void for_each_page(int64_t bytes, int64_t page_bytes, NodeTeams& teams, const Touch& touch) {
    const int64_t pages = ceil_div(bytes, page_bytes);
    teams.each([&](int node, Team& team) {
        team.parallel(ceil_div(pages - node, teams.count()), [&](int64_t turn) {
            const int64_t first = (node + turn * teams.count()) * page_bytes;
            touch(first, std::min(page_bytes, bytes - first));
        });
    });
}

}  // namespace ferry::pinned_mem
