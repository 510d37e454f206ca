#include "hostfile.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>

#include "base/text.h"
#include "base/words.h"
#include "ferry/error.h"

namespace ferry::tools {
namespace {

constexpr int kMostSlots = 4096;

std::optional<int> number_in(const std::string& text) {
    int value = 0;
    const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (status != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
    return value;
}

Host host_in(const std::string& line, const std::string& where) {
    const auto refuse = [&](const std::string& what) {
        return Error(Trouble::usage,
                     {.what = "the hostfile is not understood: " + what,
                      .where = where,
                      .measured = in_quotes(line),
                      .limit = "host slots=N, N from 1 to " + std::to_string(kMostSlots),
                      .remedy = "correct this line"});
    };
    std::istringstream words(line);
    Host host;
    std::string slots, more;
    words >> host.name >> slots >> more;
    if (host.name.find('=') != std::string::npos) throw refuse("no host");
    if (host.name.starts_with('-')) throw refuse("a host begins with -");  // an option of ssh's
    if (slots.empty()) throw refuse("no slots");
    if (!slots.starts_with("slots=")) throw refuse(in_quotes(slots));
    if (!more.empty()) throw refuse(in_quotes(more));
    const std::optional<int> count = number_in(slots.substr(6));
    if (!count || *count < 1 || *count > kMostSlots) throw refuse(in_quotes(slots));
    host.slots = *count;
    host.chosen.resize(static_cast<size_t>(host.slots));
    std::iota(host.chosen.begin(), host.chosen.end(), 0);
    return host;
}

// Equal for two names of one machine, as far as that is known: this one has several.
std::string machine_of(const std::string& name) { return is_this_machine(name) ? "" : name; }

std::vector<std::string> split(const std::string& text, char at) {
    std::vector<std::string> parts;
    std::istringstream stream(text + at);
    for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
    return parts;
}

// The slots that each host of "worker-0@worker-1:0,2" names.
std::map<std::string, std::set<int>> named_slots(const std::vector<Host>& hosts,
                                                 const std::string& text,
                                                 const std::string& option) {
    const auto refuse = [&](const std::string& what, const std::string& limit) {
        return Error(Trouble::usage, {.what = what,
                                      .where = option + " " + shown(text),
                                      .limit = limit,
                                      .remedy = "write worker-0@worker-1:0,2"});
    };
    std::map<std::string_view, const Host*> by_name;
    for (const Host& host : hosts) by_name.emplace(host.name, &host);
    std::map<std::string, std::set<int>> named;
    for (const std::string& part : split(text, '@')) {
        const size_t colon = part.find(':');
        const std::string name = part.substr(0, colon);
        const auto found = by_name.find(name);
        if (found == by_name.end()) {
            std::vector<std::string> known;
            known.reserve(hosts.size());
            for (const Host& each : hosts) known.push_back(each.name);
            const std::string near = nearest_word(name, known);
            throw refuse("no such host in the hostfile: " + in_quotes(name) +
                             (near.empty() ? "" : ", did you mean \"" + near + "\"?"),
                         std::to_string(hosts.size()) + " hosts");
        }
        const Host* host = found->second;
        const auto [its, is_first] = named.try_emplace(name);
        if (!is_first)
            throw refuse("a host is named twice: " + in_quotes(name), "once, with all its slots");
        std::set<int>& slots = its->second;
        if (colon == std::string::npos) {
            slots.insert(host->chosen.begin(), host->chosen.end());
            continue;
        }
        for (const std::string& word : split(part.substr(colon + 1), ',')) {
            const std::optional<int> slot = number_in(word);
            if (!slot || *slot >= host->slots)
                throw refuse("no such slot of host " + shown(name) + ": " + in_quotes(word),
                             "0 to " + std::to_string(host->slots - 1));
            slots.insert(*slot);
        }
    }
    return named;
}

}  // namespace

std::vector<Host> read_hostfile(const std::string& path) {
    const std::string text = read_text_file(
        path, {.name = "the hostfile", .remedy = "name a file of lines `host slots=N`"});
    const size_t bad = first_bad_byte(text);
    if (bad != std::string::npos) {
        // As a NUL the system would take it for the end of the name.
        throw Error(Trouble::usage, {.what = "the hostfile is no text",
                                     .where = path + ", " + line_and_column(text, bad),
                                     .measured = "the byte " + shown(text.substr(bad, 1)),
                                     .limit = "text in UTF-8",
                                     .remedy = "write it again, as host slots=N"});
    }
    std::istringstream file(text);
    std::vector<Host> hosts;
    std::map<std::string, std::string> known;  // a machine, and the name that it was given
    int number = 0;
    for (std::string line; std::getline(file, line);) {
        const std::string where = path + ", line " + std::to_string(++number);
        line.resize(std::min(line.find('#'), line.size()));
        line.erase(0, line.find_first_not_of(" \t\r"));
        line.erase(line.find_last_not_of(" \t\r") + 1);
        if (line.empty()) continue;
        Host host = host_in(line, where);
        const auto [same, is_new] = known.try_emplace(machine_of(host.name), host.name);
        if (!is_new) {
            const std::string& other = same->second;
            throw Error(
                Trouble::usage,
                {.what = "a host stands twice in the hostfile",
                 .where = where,
                 .measured = other == host.name ? host.name : host.name + ", which is " + other,
                 .remedy = "give it one line, with all its slots"});
        }
        hosts.push_back(std::move(host));
    }
    if (hosts.empty()) {
        throw Error(Trouble::usage, {.what = "the hostfile names no host",
                                     .where = path,
                                     .limit = "host slots=N, one a line",
                                     .remedy = "give it a line for each host"});
    }
    return hosts;
}

std::vector<Host> choose_hosts(std::vector<Host> hosts, const std::string& include,
                               const std::string& exclude) {
    if (!include.empty() && !exclude.empty()) {
        throw Error(Trouble::usage, {.what = "--include and --exclude exclude each other",
                                     .where = "ferry launch",
                                     .remedy = "give one of the two"});
    }
    if (include.empty() && exclude.empty()) return hosts;
    const bool keep = !include.empty();
    const auto named =
        named_slots(hosts, keep ? include : exclude, keep ? "--include" : "--exclude");
    for (Host& host : hosts) {
        const auto slots = named.find(host.name);
        std::erase_if(host.chosen, [&](int slot) {
            return (slots != named.end() && slots->second.contains(slot)) != keep;
        });
    }
    std::erase_if(hosts, [](const Host& host) { return host.chosen.empty(); });
    if (hosts.empty())
        throw Error(Trouble::usage, {.what = "no slot is left",
                                     .where = "--exclude " + exclude,
                                     .remedy = "exclude fewer"});
    return hosts;
}

bool is_this_machine(const std::string& host) {
    std::array<char, 256> name{};
    gethostname(name.data(), name.size() - 1);
    const std::string own = name.data();
    return host == "localhost" || host == "127.0.0.1" || host == "::1" || host == own ||
           host == own.substr(0, own.find('.'));
}

}  // namespace ferry::tools
