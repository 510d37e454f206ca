#include "machine_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace ferry::tools {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& file, std::string what, std::string measured = {}) {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .where = file,
                                 .measured = std::move(measured),
                                 .remedy = "give --save another file"});
}

json read_file(const std::string& file) {
    std::ifstream in(file);
    if (!in) {
        if (errno == ENOENT) return json{{"ferry_machine", kMachineFormat}};
        refuse(file, std::string("the machine file cannot be read: ") + std::strerror(errno));
    }
    std::ostringstream text;
    text << in.rdbuf();
    json content = json::parse(text.str(), nullptr, false, true);
    const bool known = content.is_object() && content.contains("ferry_machine") &&
                       content["ferry_machine"].is_number_integer();
    if (!known) refuse(file, "the file exists and is no machine file of ferry's");
    const auto format = content["ferry_machine"].get<int64_t>();
    if (format > kMachineFormat)
        refuse(file, "the machine file was written by a newer ferry", std::to_string(format));
    if (content.contains("paths") && !content["paths"].is_array())
        refuse(file, "the machine file's \"paths\" is no list");
    return content;
}

void write_whole(const std::string& file, const std::string& text) {
    const std::string draft = file + ".new";
    const auto fail = [&](const char* what) {
        const int error = errno;
        unlink(draft.c_str());
        throw Error(Trouble::io, {.what = std::string(what) + ": " + std::strerror(error),
                                  .where = file,
                                  .remedy = "free some space there, or give --save another file"});
    };
    const int out = open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (out < 0) fail("the machine file cannot be written");
    const auto size = static_cast<ssize_t>(text.size());
    const bool written = write(out, text.data(), text.size()) == size && fsync(out) == 0;
    if (close(out) != 0 || !written) fail("the machine file cannot be written");
    if (rename(draft.c_str(), file.c_str()) != 0) fail("the machine file cannot be replaced");
}

double rounded(double bytes_per_s) { return std::round(bytes_per_s * 1e-6) * 1e6; }

json figures_of(const IoSettings& settings) {
    const auto rate = [](int64_t bytes, const Sample& sample) {
        return rounded(static_cast<double>(bytes) / sample.seconds);
    };
    const auto cpu = [](const Sample& sample) {
        return std::round(sample.cpu_s_per_gb() * 1e4) * 1e-4;
    };
    const Sample& mixed = settings.mixed;
    return {{"path", settings.path},
            {"file_system", settings.file_system},
            {"backend", settings.backend},
            {"direct", settings.direct},
            {"block_bytes", settings.block_bytes},
            {"queue_depth", settings.queue_depth},
            {"rings", settings.rings},
            {"read_bytes_per_s", rate(settings.read.bytes_read, settings.read)},
            {"write_bytes_per_s", rate(settings.write.bytes_written, settings.write)},
            {"mixed_read_bytes_per_s", rate(mixed.bytes_read, mixed)},
            {"mixed_write_bytes_per_s", rate(mixed.bytes_written, mixed)},
            {"read_cpu_s_per_gb", cpu(settings.read)},
            {"write_cpu_s_per_gb", cpu(settings.write)},
            {"mixed_cpu_s_per_gb", cpu(mixed)},
            {"measured", machine_json()["date"]}};
}

}  // namespace

void check_machine_file(const std::string& file) {
    read_file(file);
    const std::filesystem::path parent = std::filesystem::absolute(file).parent_path();
    if (access(parent.c_str(), W_OK | X_OK) != 0)
        refuse(file, std::string("no file can be written there: ") + std::strerror(errno));
    if (std::filesystem::is_directory(file)) refuse(file, "it is a directory");
}

json settings_json(const std::vector<IoSettings>& paths) {
    json all = json::array();
    for (const IoSettings& settings : paths) all.push_back(figures_of(settings));
    return all;
}

void save_paths(const std::string& file, const std::vector<IoSettings>& paths) {
    json content = read_file(file);
    content["ferry_machine"] = kMachineFormat;
    json& known = content["paths"];
    if (known.is_null()) known = json::array();
    for (const json& figures : settings_json(paths)) {
        auto found = std::find_if(known.begin(), known.end(), [&](const json& one) {
            return one.is_object() && one.value("path", json()) == figures["path"];
        });
        if (found == known.end())
            known.push_back(figures);
        else
            found->update(figures);
    }
    write_whole(file, content.dump(2) + "\n");
}

}  // namespace ferry::tools
