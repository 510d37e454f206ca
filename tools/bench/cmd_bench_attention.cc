// `ferry bench attention`: the attention of one shape alone, forward and backward, without a model.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/random.h"
#include "bench_rows.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/team.h"
#include "ferry/units.h"
#include "ops/timed_ops.h"
#include "ops/timed_stream.h"
#include "tools/commands.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/process/child_process.h"
#include "topology/topology.h"
#include "word_option.h"

namespace ferry::tools {
namespace {

constexpr config::Words<AttentionKernels, 2> kKernelWords{
    {{AttentionKernels::best, "best"}, {AttentionKernels::ferry, "ferry"}}};

struct AttentionOptions {
    ops::Attention shape{.sequences = 1,
                         .sequence = 2048,
                         .heads = 32,
                         .kv_heads = 8,
                         .head_dim = 128,
                         .type = DType::bf16};
    DeviceKind device = DeviceKind::cpu;
    AttentionKernels kernels = AttentionKernels::best;
    // A pattern of blocks: those right before a query's own and the first ones; none: dense.
    int block = 128;
    int64_t window_blocks = 0, global_blocks = 0;
    int64_t documents = 0;  // of one length in each sequence; 0: not isolated
    int rounds = 5;
    bool json = false;
};

ops::BlockLists lists_of(const AttentionOptions& o) {
    ops::BlockLists lists{.block = o.block,
                          .layouts = 1,
                          .blocks = static_cast<int>(ceil_div(o.shape.sequence, o.block))};
    lists.row_starts.push_back(0);
    for (int row = 0; row < lists.blocks; ++row) {
        for (int column = 0; column <= row; ++column)
            if (row - column < o.window_blocks || column < o.global_blocks)
                lists.columns.push_back(column);
        lists.row_starts.push_back(static_cast<int32_t>(lists.columns.size()));
    }
    lists.transpose();
    return lists;
}

class AttentionBench {
public:
    explicit AttentionBench(const AttentionOptions& options)
        : shape_(options.shape),
          executor_(make_thread_executor()),
          device_(Device::open(options.device, *executor_)),
          team_(options.device == DeviceKind::cpu ? this_machine()->cores() : 1),
          ops_(on_gpu() ? ops::make_cuda_ops(*device_, options.kernels) : ops::make_cpu_ops(team_)),
          timed_(*ops_, *device_),
          compute_(*device_, *executor_) {
        if (options.window_blocks + options.global_blocks > 0) {
            lists_ = lists_of(options);
            shape_.pattern = &lists_;
        }
        shape_.documents = options.documents > 0;
        place();  // without memory, for the sum of it
        device_->reserve(std::exchange(end_, 0));
        place();
        for (ops::View* each : {&q_, &k_, &v_, &dout_}) fill(*each);
        if (shape_.pattern != nullptr) upload_lists();
        if (shape_.documents) upload_documents(options.documents);
    }

    // The calls of each round, by the operation's name.
    std::vector<std::vector<ops::OpCall>> run(int rounds) {
        const auto both = [&] { forward_and_backward(); };
        compute_.launch(both);
        // A GPU's clock falls within a second of load to what its power limit leaves.
        using Clock = std::chrono::steady_clock;
        const auto warm = Clock::now() + std::chrono::seconds(1);
        while (on_gpu() && Clock::now() < warm) compute_.launch(both);
        std::vector<std::vector<ops::OpCall>> found;
        for (int i = 0; i < rounds; ++i) {
            const double enqueued_s = compute_.launch(both);
            compute_.time_calls(timed_, both, enqueued_s);
            found.push_back(timed_.take());
        }
        return found;
    }

    std::string architecture() const { return device_->architecture(); }
    int64_t forward_scratch_bytes() const { return ops_->attention_forward_scratch_bytes(shape_); }
    int64_t backward_scratch_bytes() const {
        return ops_->attention_backward_scratch_bytes(shape_);
    }

private:
    bool on_gpu() const { return device_->kind() == DeviceKind::cuda; }

    std::byte* take(int64_t bytes) {
        std::byte* at = device_->memory().empty() ? nullptr : device_->memory().data() + end_;
        end_ += round_up(bytes, 256);
        return at;
    }
    // Queries, keys and values side by side, as a block has them; their gradients too.
    void place() {
        const ops::Attention& s = shape_;
        const int64_t rows = s.sequences * s.sequence;
        const int64_t query = s.heads * s.head_dim, key = s.kv_heads * s.head_dim;
        const auto matrix = [&](int64_t cols) {
            return ops::View::of(take(rows * cols * size_of(s.type)), s.type, rows, cols);
        };
        const ops::View qkv = matrix(query + 2 * key), dqkv = matrix(query + 2 * key);
        q_ = qkv.col_range(0, query);
        k_ = qkv.col_range(query, key);
        v_ = qkv.col_range(query + key, key);
        dq_ = dqkv.col_range(0, query);
        dk_ = dqkv.col_range(query, key);
        dv_ = dqkv.col_range(query + key, key);
        out_ = matrix(query);
        dout_ = matrix(query);
        lse_ = reinterpret_cast<float*>(take(s.heads * rows * 4));
        if (s.pattern != nullptr) shape_.blocks = lists_.view_at(take(lists_.memory_bytes()));
        if (s.documents) {
            shape_.document_start = reinterpret_cast<int32_t*>(take(rows * 4));
            shape_.document_end = reinterpret_cast<int32_t*>(take(rows * 4));
        }
        scratch_ = take(std::max(forward_scratch_bytes(), backward_scratch_bytes()));
    }
    void forward_and_backward() {
        ops::Ops& ops = timed_.ops();
        ops.attention_forward(shape_, q_, k_, v_, out_, lse_, scratch_);
        ops.attention_backward(shape_, q_, k_, v_, out_, dout_, lse_, dq_, dk_, dv_, scratch_);
    }

    void upload(const std::vector<int32_t>& from, const int32_t* to) {
        const auto count = static_cast<int64_t>(from.size());
        if (count == 0) return;
        compute_.launch([&] {  // words of four bytes, whatever they are
            ops_->copy_out(ops::ConstView::of(from.data(), DType::f32, 1, count),
                           ops::View::of(const_cast<int32_t*>(to), DType::f32, 1, count));
        });
        compute_.wait();
    }
    void upload_lists() {
        upload(lists_.row_starts, shape_.blocks.row_starts);
        upload(lists_.columns, shape_.blocks.columns);
        upload(lists_.column_starts, shape_.blocks.column_starts);
        upload(lists_.rows, shape_.blocks.rows);
    }
    void upload_documents(int64_t documents) {
        std::vector<int32_t> starts, ends;
        for (int64_t i = 0; i < shape_.sequences * shape_.sequence; ++i) {
            const int64_t document = i % shape_.sequence * documents / shape_.sequence;
            starts.push_back(static_cast<int32_t>(ceil_div(document * shape_.sequence, documents)));
            ends.push_back(
                static_cast<int32_t>(ceil_div((document + 1) * shape_.sequence, documents)));
        }
        upload(starts, shape_.document_start);
        upload(ends, shape_.document_end);
    }

    // Normal deviates, again and again.
    void fill(const ops::View& to) {
        const int64_t row_bytes = to.cols * size_of(to.type);
        std::vector<std::byte> pattern(static_cast<size_t>(row_bytes));
        compute_.launch([&] {
            for (int64_t r = 0; r < to.rows; ++r) {
                if (r < kPatterns) draw(to.type, static_cast<uint32_t>(r), pattern);
                const ops::ConstView row =
                    r < kPatterns ? ops::ConstView::of(pattern.data(), to.type, 1, to.cols)
                                  : ops::ConstView(to.row_range(r % kPatterns, 1));
                ops_->copy_out(row, to.row_range(r, 1));
                if (r < kPatterns && on_gpu()) compute_.wait();  // before the pattern is drawn anew
            }
        });
    }
    static void draw(DType type, uint32_t row, std::vector<std::byte>& to) {
        const auto width = static_cast<size_t>(size_of(type));
        for (size_t i = 0; i < to.size() / width; ++i) {
            const float value =
                philox_normal({1, Purpose::test}, {0, 0, row, static_cast<uint32_t>(i)});
            const uint16_t half = type == DType::bf16 ? to_bf16(value) : to_f16(value);
            const void* from = type == DType::f32 ? static_cast<const void*>(&value) : &half;
            std::memcpy(to.data() + i * width, from, width);
        }
    }

    static constexpr int64_t kPatterns = 64;
    ops::Attention shape_;
    ops::BlockLists lists_{};
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<Device> device_;
    Team team_;
    std::unique_ptr<ops::Ops> ops_;
    ops::TimedOps timed_;
    ops::TimedStream compute_;
    int64_t end_ = 0;
    ops::View q_{}, k_{}, v_{}, dq_{}, dk_{}, dv_{}, out_{}, dout_{};
    float* lse_ = nullptr;
    std::byte* scratch_ = nullptr;
};

BenchRow row_of(const std::vector<std::vector<ops::OpCall>>& rounds, size_t which,
                int64_t scratch_bytes) {
    std::vector<double> seconds;
    seconds.reserve(rounds.size());
    for (const auto& calls : rounds) seconds.push_back(calls.at(which).seconds);
    const ops::OpCall& call = rounds.front().at(which);
    const double middle = median(seconds);
    return {.name = call.name + ", " + call.shape,
            .value = middle * 1e3,
            .unit = "ms",
            .more = {{"TFLOP/s", call.flops / middle * 1e-12},
                     {"scratch MiB", static_cast<double>(scratch_bytes) / kMiB}}};
}

std::string command_of(const AttentionOptions& o) {
    const ops::Attention& s = o.shape;
    std::vector<std::string> words{"ferry", "bench", "attention"};
    const auto add = [&](const char* name, const std::string& value) {
        words.insert(words.end(), {name, value});
    };
    add("--sequences", std::to_string(s.sequences));
    add("--sequence", std::to_string(s.sequence));
    add("--heads", std::to_string(s.heads));
    add("--kv-heads", std::to_string(s.kv_heads));
    add("--head-dim", std::to_string(s.head_dim));
    if (s.window > 0) add("--window", std::to_string(s.window));
    if (o.window_blocks + o.global_blocks > 0) {
        add("--block", std::to_string(o.block));
        add("--window-blocks", std::to_string(o.window_blocks));
        add("--global-blocks", std::to_string(o.global_blocks));
    }
    if (o.documents > 0) add("--documents", std::to_string(o.documents));
    add("--precision", spelled(kTypeWords, s.type));
    add("--device", spelled(kDeviceWords, o.device));
    if (o.kernels != AttentionKernels::best) add("--kernels", spelled(kKernelWords, o.kernels));
    add("--rounds", std::to_string(o.rounds));
    return shell_line(words);
}

void run_attention(AttentionOptions options) {
    ops::Attention& s = options.shape;
    if (s.heads % s.kv_heads != 0)
        throw Error(Trouble::usage,
                    {.what = "heads do not share those of keys evenly",
                     .where = "--heads, --kv-heads",
                     .measured = fmt::format("{} and {}", s.heads, s.kv_heads),
                     .limit = "heads a multiple of those of keys",
                     .remedy = fmt::format("give {} heads", round_up(s.heads, s.kv_heads))});
    if (options.documents > s.sequence)
        throw Error(Trouble::usage, {.what = "a sequence has fewer tokens than documents",
                                     .where = "--documents",
                                     .measured = std::to_string(options.documents),
                                     .limit = std::to_string(s.sequence),
                                     .remedy = "give fewer documents"});
    s.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
    AttentionBench bench(options);
    const auto rounds = bench.run(options.rounds);
    const std::vector<BenchRow> rows{row_of(rounds, 0, bench.forward_scratch_bytes()),
                                     row_of(rounds, 1, bench.backward_scratch_bytes())};
    if (options.json) {
        nlohmann::json object = rows_json(rows, command_of(options), machine_json());
        object["device"] = bench.architecture();
        return print_text(json_line(object));
    }
    print("{}; {}\n{}", machine_text(), bench.architecture(), rows_table(rows, ""));
}

}  // namespace
}  // namespace ferry::tools

void add_attention_bench(CLI::App& bench) {
    using namespace ferry::tools;
    const auto options = std::make_shared<AttentionOptions>();
    CLI::App* command =
        bench.add_subcommand("attention", "attention of one shape, forward and backward");
    const auto number = [&](const char* name, int64_t& value, const char* what, int64_t most) {
        command->add_option(name, value, what)
            ->check(CLI::Range(int64_t{1}, most))
            ->capture_default_str();
    };
    ferry::ops::Attention& s = options->shape;
    number("--sequences", s.sequences, "of one call", 1 << 20);
    number("--sequence", s.sequence, "tokens of each", 1 << 24);
    number("--heads", s.heads, "of queries", 1 << 10);
    number("--kv-heads", s.kv_heads, "of keys and values", 1 << 10);
    number("--head-dim", s.head_dim, "elements of a head", 256);
    command->add_option("--window", s.window, "keys that a query sees; default: all before it")
        ->check(CLI::Range(1, 1 << 24));
    command->add_option("--block", options->block, "tokens of a block of the pattern")
        ->check(CLI::IsMember({64, 128}))
        ->capture_default_str();
    command
        ->add_option("--window-blocks", options->window_blocks,
                     "blocks of keys that a block sees, its own and those before it")
        ->check(CLI::Range(0, 1 << 18));
    command->add_option("--global-blocks", options->global_blocks, "first blocks that all see")
        ->check(CLI::Range(0, 1 << 18));
    command
        ->add_option("--documents", options->documents,
                     "of one length in a sequence, which do not see each other")
        ->check(CLI::Range(1, 1 << 24));
    add_word_option(*command, "--precision", s.type, kTypeWords, "of all operands");
    add_word_option(*command, "--device", options->device, kDeviceWords, "cpu or cuda");
    add_word_option(*command, "--kernels", options->kernels, kKernelWords,
                    "as numerics.attention, of a GPU");
    command->add_option("--rounds", options->rounds, "times that each is timed")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    command->add_flag("--json", options->json, "one JSON object on standard output");
    command->footer(
        "ms: of one call, the median over rounds. TFLOP/s: two products over the pairs of query\n"
        "and key that see each other forward, five backward; documents count as one. On a GPU\n"
        "scratch is what the plan of a run counts.\n"
        "Example: ferry bench attention --sequence 32768 --heads 32 --kv-heads 8 --device cuda");
    command->callback([options] { run_attention(*options); });
}
