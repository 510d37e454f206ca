// Hosts and their slots as `ferry launch` takes them: DeepSpeed's hostfiles and its ways to include
// and exclude.
#pragma once

#include <string>
#include <vector>

namespace ferry::tools {

struct Host {
    std::string name{};
    int slots = 0;              // as the file says
    std::vector<int> chosen{};  // slots that get a rank each: all, or those that were named
    bool whole() const { return chosen.size() == static_cast<size_t>(slots); }
};

// Lines `host slots=N`; `#` begins a comment. Throws usage naming file, line and fault.
std::vector<Host> read_hostfile(const std::string& path);

// `include`: only these, `exclude`: all but these; one of them may be given. Hosts are separated by
// `@`, slots stand behind a colon: "worker-0@worker-1:0,2". Throws usage.
std::vector<Host> choose_hosts(std::vector<Host> hosts, const std::string& include,
                               const std::string& exclude);

// Whether that name is this machine: nothing is asked of the network.
bool is_this_machine(const std::string& host);

}  // namespace ferry::tools
