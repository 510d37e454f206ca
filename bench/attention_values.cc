// What attention gives and takes back, of operands in files: for bench/attention_values.py, which
// compares it. Each line of standard input is a case,
//   DIRECTORY PATTERN TYPE SEQUENCES SEQUENCE HEADS KV_HEADS HEAD_DIM WINDOW DOCUMENTS
// whose directory has q, k, v and dout, [SEQUENCES * SEQUENCE, heads * HEAD_DIM] each, and, unless
// DOCUMENTS is 0, starts and ends, int32. It receives out, dq, dk, dv and lse, and `cells`: a byte
// for each layout, block of queries and block of keys, 1 where the pattern has it. For each case
// the program prints "DIRECTORY BLOCK LAYOUTS BLOCKS".
//   bench_attention_values cpu|cuda
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/team.h"
#include "ops/ops.h"
#include "ops/patterns.h"

namespace {

using namespace ferry;
using namespace ferry::ops;

// cuDNN's backward pass keeps up to a GiB of slopes.
int64_t arena_bytes(DeviceKind kind) {
    return kind == DeviceKind::cpu ? 256 * kMiB : int64_t{2} * 1024 * kMiB;
}

// Every cell below the diagonal by a rule of its own, and the diagonal.
std::shared_ptr<PatternLayout> drawn(int64_t side, int64_t heads) {
    auto layout = std::make_shared<PatternLayout>();
    layout->where = "a rule";
    layout->block = 64;
    layout->layers = 1;
    layout->heads = heads;
    layout->side = side;
    for (int64_t head = 0; head < heads; ++head) {
        for (int64_t row = 0; row < side; ++row) {
            for (int64_t column = 0; column < side; ++column) {
                const bool there = column == row || (row * 7 + column * 5 + head * 3) % 4 < 2;
                layout->cells.push_back(column <= row && there ? 1 : 0);
            }
        }
    }
    return layout;
}

Pattern pattern_of(const std::string& name, int64_t sequence, int64_t heads) {
    if (name == "whole") return {};
    if (name == "window") return {.kind = PatternKind::window, .num_sliding_window_blocks = 5};
    if (name == "fixed") return {.kind = PatternKind::fixed, .num_local_blocks = 2};
    if (name == "fixed-heads")
        return {.kind = PatternKind::fixed,
                .different_layout_per_head = true,
                .num_local_blocks = 2,
                .num_different_global_patterns = 2};
    if (name == "bigbird")
        return {.kind = PatternKind::bigbird,
                .different_layout_per_head = true,
                .num_random_blocks = 2,
                .seed = 7};
    if (name == "longformer")
        return {.kind = PatternKind::longformer, .block = 128, .global_block_indices = {0, 2}};
    if (name == "variable")
        return {.kind = PatternKind::variable,
                .block = 32,
                .num_random_blocks = 1,
                .local_window_blocks = {1, 3, 2},
                .global_block_indices = {2}};
    if (name == "layout")
        return {.kind = PatternKind::layout, .layout = drawn((sequence + 63) / 64, heads)};
    std::fprintf(stderr, "no pattern: %s\n", name.c_str());
    std::exit(2);
}

std::vector<std::byte> read(const std::filesystem::path& path, int64_t bytes) {
    std::vector<std::byte> found(static_cast<size_t>(bytes));
    std::ifstream file(path, std::ios::binary);
    file.read(reinterpret_cast<char*>(found.data()), bytes);
    if (file.gcount() != bytes) {
        std::fprintf(stderr, "%s does not have %lld bytes\n", path.c_str(),
                     static_cast<long long>(bytes));
        std::exit(2);
    }
    return found;
}

void write(const std::filesystem::path& path, const void* data, int64_t bytes) {
    std::ofstream file(path, std::ios::binary);
    file.write(static_cast<const char*>(data), bytes);
    if (!file.flush()) {
        std::fprintf(stderr, "%s cannot be written\n", path.c_str());
        std::exit(2);
    }
}

class Values {
public:
    explicit Values(DeviceKind kind)
        : executor_(make_thread_executor()), device_(Device::open(kind, *executor_)), team_(2) {
        device_->reserve(arena_bytes(kind));
        ops_ = kind == DeviceKind::cpu ? make_cpu_ops(team_) : make_cuda_ops(*device_);
    }

    void run(const std::string& line) {
        std::istringstream words(line);
        std::string directory, pattern, type;
        int64_t documents = 0;
        Attention s;
        words >> directory >> pattern >> type >> s.sequences >> s.sequence >> s.heads >>
            s.kv_heads >> s.head_dim >> s.window >> documents;
        const auto known = dtype_from_name(type);
        if (!words || !known) {
            std::fprintf(stderr, "no case: %s\n", line.c_str());
            std::exit(2);
        }
        s.type = *known;
        s.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
        s.documents = documents != 0;
        BlockLists lists;
        if (pattern != "dense")
            lists = lists_of(pattern_of(pattern, s.sequence, s.heads), s.sequence, s.heads, 0);
        used_ = 0;
        attend(s, pattern == "dense" ? nullptr : &lists, directory);
        std::printf("%s %d %d %d\n", directory.c_str(), lists.block, lists.layouts, lists.blocks);
    }

private:
    std::byte* take(int64_t bytes) {
        std::byte* at = device_->memory().data() + used_;
        used_ += round_up(bytes, 256);
        FERRY_CHECK(used_ <= std::ssize(device_->memory()));
        return at;
    }
    std::byte* put(const void* from, int64_t bytes) {
        std::byte* at = take(bytes);
        stream().copy(at, from, bytes);
        finish();
        return at;
    }
    Stream& stream() { return device_->stream(StreamKind::compute); }
    void finish() {
        std::atomic<uint64_t> done = 0;
        stream().signal(done);
        while (done.load(std::memory_order_acquire) == 0) executor_->wait(kForever);
        device_->check();
    }

    void attend(Attention s, const BlockLists* lists, const std::filesystem::path& directory) {
        const int64_t tokens = s.sequences * s.sequence, lse_bytes = tokens * s.heads * 4;
        const auto shape = [&](int64_t heads) {
            return View::of(nullptr, s.type, tokens, heads * s.head_dim);
        };
        const auto bytes_of = [](const View& v) { return v.rows * v.cols * size_of(v.type); };
        const auto given = [&](const char* name, int64_t heads) {
            View v = shape(heads);
            v.data = put(read(directory / name, bytes_of(v)).data(), bytes_of(v));
            return v;
        };
        const auto room = [&](int64_t heads) {
            View v = shape(heads);
            v.data = take(bytes_of(v));
            return v;
        };
        if (lists != nullptr) {
            s.pattern = lists;
            std::vector<int32_t> all;
            for (const auto* list :
                 {&lists->row_starts, &lists->columns, &lists->column_starts, &lists->rows})
                all.insert(all.end(), list->begin(), list->end());
            s.blocks = lists->view_at(put(all.data(), lists->memory_bytes()));
        }
        const auto borders = [&](const char* name) {
            return reinterpret_cast<const int32_t*>(
                put(read(directory / name, tokens * 4).data(), tokens * 4));
        };
        if (s.documents) {
            s.document_start = borders("starts");
            s.document_end = borders("ends");
        }
        const View q = given("q", s.heads), k = given("k", s.kv_heads), v = given("v", s.kv_heads);
        const View dout = given("dout", s.heads), out = room(s.heads), dq = room(s.heads);
        const View dk = room(s.kv_heads), dv = room(s.kv_heads);
        auto* lse = reinterpret_cast<float*>(take(lse_bytes));
        std::byte* scratch = take(std::max(ops_->attention_forward_scratch_bytes(s),
                                           ops_->attention_backward_scratch_bytes(s)));
        ops_->attention_forward(s, q, k, v, out, lse, scratch);
        ops_->attention_backward(s, q, k, v, out, dout, lse, dq, dk, dv, scratch);
        finish();
        const auto keep = [&](const char* name, const void* from, int64_t bytes) {
            std::vector<std::byte> host(static_cast<size_t>(bytes));
            stream().copy(host.data(), from, bytes);
            finish();
            write(directory / name, host.data(), bytes);
        };
        keep("out", out.data, bytes_of(out));
        keep("dq", dq.data, bytes_of(dq));
        keep("dk", dk.data, bytes_of(dk));
        keep("dv", dv.data, bytes_of(dv));
        keep("lse", lse, lse_bytes);
        if (lists != nullptr) write_cells(*lists, directory);
    }

    static void write_cells(const BlockLists& lists, const std::filesystem::path& directory) {
        const auto side = static_cast<size_t>(lists.blocks);
        std::vector<uint8_t> cells(static_cast<size_t>(lists.layouts) * side * side);
        for (int64_t layout = 0; layout < lists.layouts; ++layout) {
            for (int64_t row = 0; row < lists.blocks; ++row) {
                for (const int32_t column : lists.keys_of(layout, row))
                    cells[static_cast<size_t>(layout * lists.blocks + row) * side +
                          static_cast<size_t>(column)] = 1;
            }
        }
        write(directory / "cells", cells.data(), std::ssize(cells));
    }

    std::unique_ptr<Executor> executor_;
    std::unique_ptr<Device> device_;
    Team team_;
    std::unique_ptr<Ops> ops_;
    int64_t used_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    const std::string device = argc == 2 ? argv[1] : "";
    if (device != "cpu" && device != "cuda") {
        std::fprintf(stderr, "usage: bench_attention_values cpu|cuda < CASES\n");
        return 2;
    }
    try {
        Values values(device_from(device));
        for (std::string line; std::getline(std::cin, line);) values.run(line);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
