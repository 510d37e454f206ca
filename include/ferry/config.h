// The JSON configuration of `ferry train`, read and checked. Unknown keys, wrong types and values
// outside their range throw Trouble::usage naming the key and the nearest known one.
// docs/configuration.md lists every key.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/aio_kinds.h"
#include "ferry/codec_kind.h"
#include "ferry/device_kind.h"
#include "ferry/dtype.h"
#include "ferry/optim_kinds.h"
#include "ferry/units.h"

namespace ferry {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The words of the keys. `automatic`, `best` and an empty std::optional are written "auto": ferry
// chooses.
enum class OnDoubt : uint8_t { refuse, ignore };
enum class MasterFormat : uint8_t { fp32, split };  // split: 16 bits beside the weight
enum class Speculate : uint8_t { automatic, off, all };
enum class AttentionPattern : uint8_t {
    dense,
    window,
    fixed,
    bigbird,
    longformer,
    variable,
    layout  // drawn by the user
};
enum class AttentionDirection : uint8_t { unidirectional, bidirectional };
enum class OnNonfinite : uint8_t { stop, skip };  // a NaN or Inf in loss or gradient
enum class HashEvery : uint8_t { end, step };
enum class UnsavedRun : uint8_t { go_on, stop };  // where a checkpoint cannot be written

// Every so many steps or so much time, of which one is zero; both: never.
struct Period {
    int64_t steps = 0;
    double seconds = 0;
    bool never() const { return steps == 0 && seconds == 0; }
};

struct ModelConfig {
    // A Hugging Face directory, whose config.json then says everything below `load`.
    std::string path{};
    OnDoubt dropout = OnDoubt::refuse;  // where config.json asks for it
    bool load = true;                   // its weights; false: random ones
    int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0;
    int64_t vocab = 256;
    bool tie_embeddings = false;
    double rope_theta = 10000, norm_eps = 1e-5;
};

struct DataConfig {
    std::string tokens{};  // file written by `ferry data`
    // For tokens whose vocabulary is half the loaded model's, or less.
    OnDoubt small_vocabulary = OnDoubt::refuse;
    double held_back = 0.05;  // fraction of the tokens, at the end, that only evaluation sees
    bool isolate_documents = false;  // they do not see each other, and positions begin anew
};

// Which earlier blocks of tokens a block sees; the names are those of DeepSpeed's sparse_attention.
// Lengths are in blocks of `block` tokens.
struct AttentionConfig {
    AttentionPattern pattern = AttentionPattern::dense;
    int64_t block = 64;
    std::vector<int> layers{};  // blocks of the model that have the pattern; empty: all
    bool different_layout_per_head = false, different_layout_per_layer = false;
    AttentionDirection attention = AttentionDirection::unidirectional;
    bool horizontal_global_attention = false;
    int64_t num_local_blocks = 4, num_global_blocks = 1, num_different_global_patterns = 1;
    std::optional<int64_t> num_random_blocks{};  // empty: bigbird 1, variable 0
    int64_t num_sliding_window_blocks = 3;
    std::vector<int> local_window_blocks{4};
    std::vector<int> global_block_indices{0}, global_block_end_indices{};
    std::string layout{};  // file of a layout
    bool allow_empty_rows = false;
};

struct BatchConfig {
    int64_t sequence = 0;       // tokens
    int64_t micro_batch = 1;    // sequences a kernel
    int64_t micro_batches = 1;  // in one optimizer step
};

// x' = a x + b (x x^T) x + c (x x^T)^2 x. These are Jordan's, and torch.optim.Muon's.
struct NewtonSchulzCoefficients {
    double a = 3.4445, b = -4.7750, c = 2.0315;
};

struct OptimizerConfig {
    optim::Method method = optim::Method::adamw;
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
    double momentum = 0;             // sgd, muon
    bool nesterov = false;           // sgd, muon
    double initial_accumulator = 0;  // adagrad
    // Muon's own keys. The last two are of what it leaves to AdamW: the learning rate (empty: lr),
    // and glob patterns over the names of further tensors that AdamW takes.
    int64_t ns_steps = 5;
    NewtonSchulzCoefficients ns_coefficients{};
    DType ns_products = DType::f32;  // what its products' factors are rounded to; not f16
    optim::AdjustLr adjust_lr = optim::AdjustLr::original;
    std::optional<double> adamw_lr{};
    std::vector<std::string> adamw_tensors{};
    int64_t freeze_step = 0;  // onebit_adam: updates before its second moment stays as it is
    // zeroone_adam (docs/configuration.md). Its second moment may change until update
    // var_freeze_step; after var_update_scaler changes at an interval the interval grows. Then
    // exchanges have intervals, which grow after local_step_scaler updates, up to
    // local_step_clipper.
    int64_t var_freeze_step = 0, var_update_scaler = 16;
    int64_t local_step_scaler = 32678, local_step_clipper = 1;
    bool decay_norms_and_biases = false;
    MomentType moments = MomentType::f32;  // what they are kept in
    // int8: glob patterns over tensor names; the embeddings' by default.
    std::vector<std::string> fp32_moments{"*embed_tokens*", "*wte*", "*wpe*"};
    MasterFormat master = MasterFormat::fp32;
};

struct ScheduleConfig {
    optim::Decay kind = optim::Decay::constant;
    int64_t warmup_steps = 0;
    int64_t total_steps = 0;    // 0: `steps`
    int64_t decay_steps = 0;    // wsd; 0: a tenth of total_steps
    double final_fraction = 0;  // as a fraction of the peak
    bool log_warmup = false;
};

struct EvaluateConfig {
    int64_t every = 0;          // steps; 0: at both ends alone, when `micro_batches` > 0
    int64_t micro_batches = 0;  // 0: no evaluation
};

struct NvmePath {
    std::string path{};
    int64_t size_bytes = kUnlimited;
    double endurance_tbw = 0;  // terabytes the drive is rated to be written; 0: unknown
};

struct BudgetConfig {
    int64_t device_bytes = kUnlimited, host_bytes = kUnlimited;
    std::vector<NvmePath> nvme{};
    // Ranks that share a host, and so its budgets, in a plan for ranks that are not there. Empty:
    // as the plan's options say.
    std::optional<int> ranks_per_host{};
};

// Where things go and in what portions. No key changes a number. Empty: the planner chooses.
struct SwapConfig {
    std::optional<int64_t> chunk_elements{};  // multiple of 4,096
    // Chunks that are read from storage at once, and as many are written. Empty: by the paths.
    std::optional<int64_t> chunks_at_once{};
    std::optional<int64_t> groups{};             // of micro-batches; each group passes all layers
    Speculate speculate = Speculate::automatic;  // updates before the clip factor is known
    std::optional<double> expect_clipped{};      // share of the steps; empty: nobody knows
    std::optional<double> state_on_nvme{};       // share of the state; empty: what the budget asks
    std::optional<double> state_on_device{};     // at most; empty: all that fits, of a GPU
    // How many blocks save attention's output, the MLP's first products or the products around
    // attention, so that backward does not compute them again.
    std::optional<int64_t> save_attention{}, save_mlp{}, save_projections{};
    std::optional<int64_t> save_inputs{};  // at most so many blocks' inputs on the device
    bool verify = true;                    // checksums of what comes back from NVMe
};

// Which checkpoints stay; the newest always does.
struct KeptCheckpoints {
    int64_t last = 2;   // the newest
    int64_t every = 0;  // those of steps that it divides; 0: none for that
    int64_t best = 0;   // checkpoints with the lowest held-back loss
};
struct CheckpointConfig {
    bool durable_steps = false;  // a kill and a power failure cost the last steps only
    std::string dir{};           // empty: no checkpoints
    Period every{};              // beside those at the end
    KeptCheckpoints keep{};
    UnsavedRun on_failure = UnsavedRun::go_on;
    std::optional<int64_t>
        memory_bytes{};  // for one on its way; empty: what is left beside the plan
};

struct IoConfig {
    aio::BackendKind backend = aio::BackendKind::automatic;
    int64_t block_bytes = 1 * kMiB;
    int queue_depth = 32;  // requests that each ring may have under way
    int rings = 1;         // a path
    bool direct = true;
    aio::Leftover leftovers = aio::Leftover::remove;  // files of a killed run
};

// What ranks send each other as codes: docs/communication.md.
struct CompressConfig {
    CodecKind gradients = CodecKind::none;
    CodecKind weights = CodecKind::none;  // none or int8
    int64_t block = 256;                  // elements that share a scale
};
// Where a copy of the gathered weights is kept until the end of a step. host: the ranks of a host
// keep shards of it, so that backward gathers them inside the host.
enum class SecondShard : uint8_t { none, host };

// How several ranks share a run.
struct ZeroConfig {
    int64_t stage = 3;  // what a rank keeps only its shard of: docs/ranks.md
    CompressConfig compress{};
    int ranks_per_host = 1;  // neighbours that exchange among themselves first; 1: none do
    SecondShard second_shard = SecondShard::none;
    double timeout_seconds = 300;  // that a rank waits for the others in one exchange
};

// What ranks that share a sequence send each other for attention. heads: each then has all tokens
// of some heads. ring: keys and queries go round, and each has its tokens of all heads. automatic:
// heads where the ranks divide them, and on a GPU; else a ring.
enum class SequenceOrder : uint8_t { automatic, heads, ring };

// The order in which stages of a pipeline take micro-batches.
//   one_f_one_b  one goes back for each that goes forward
//   zero_bubble  the same, but backward leaves the gradients of weights for later. They fill a part
//                of the time that stages wait (zero-bubble H1)
//   interleaved  one_f_one_b with several virtual stages on each rank
//   round_robin  all micro-batches go through one virtual stage before the next
//   automatic    by simulation the fastest that the number of virtual stages admits. Where ferry
//                chooses that number too, it tries several
enum class PipelineSchedule : uint8_t {
    automatic,
    one_f_one_b,
    zero_bubble,
    interleaved,
    round_robin
};

// What several ranks do together beside sharing the state.
struct ParallelConfig {
    int sequence = 1;  // ranks that share each sequence: docs/attention.md
    SequenceOrder sequence_order = SequenceOrder::automatic;
    int tensor = 1;    // ranks that share the tensors of each block: docs/parallelism.md
    int pipeline = 1;  // stages of layers, each of as many ranks
    PipelineSchedule schedule = PipelineSchedule::automatic;
    // Runs of blocks of each stage; empty: chosen with the schedule. Part of the numerics record.
    std::optional<int> virtual_stages = 1;
};

struct NumericsConfig {
    std::optional<DType> residual{};                      // empty: bf16 for bf16, else fp32
    std::optional<DType> wire{};                          // of gradients; empty: the compute type
    AttentionKernels attention = AttentionKernels::best;  // on a GPU
    std::optional<int64_t> head_tile{};  // tokens; empty: by the model, docs/numerics.md
    std::optional<int64_t> mlp_tile{};   // empty: by the micro-batch
    std::string products{};  // file of a table of a GPU's products; empty: the library chooses
};

struct Config {
    ModelConfig model{};
    DataConfig data{};
    AttentionConfig attention{};
    BatchConfig batch{};
    OptimizerConfig optimizer{};
    ScheduleConfig schedule{};
    EvaluateConfig evaluate{};
    BudgetConfig budgets{};
    SwapConfig swap{};
    CheckpointConfig checkpoint{};
    IoConfig io{};
    NumericsConfig numerics{};
    ZeroConfig zero{};
    ParallelConfig parallel{};
    std::vector<std::string> freeze{};  // glob patterns over tensor names
    double clip_norm = 0;               // 0: no clipping
    uint32_t seed = 0;
    int64_t steps = 0;
    DeviceKind device = DeviceKind::cpu;
    DType precision = DType::f32;  // the type that kernels compute in
    OnNonfinite on_nonfinite = OnNonfinite::stop;
    std::optional<int> threads{};           // workers; empty: planned from the cores
    std::vector<int> reserved_cores{};      // OS indices, left to the threads of I/O and copies
    HashEvery hash_every = HashEvery::end;  // when the state's hash is taken
};

// `overrides` are "key.path=value" (JSON value, or a bare string). Relative paths inside the file
// are relative to the working directory. Every key of the result is set. What the file leaves out
// is derived: kv_heads, head_dim, the schedule's total_steps and decay_steps, and constants for
// which optimizer.method has its own defaults. A key that the chosen method or schedule does not
// use gets a warning and is not refused.
Config load_config(const std::string& path, std::span<const std::string> overrides);
Config parse_config(std::string_view json, const std::string& where,
                    std::span<const std::string> overrides);
// The keys that the file or an override gives, in the order of their names. Only what reading them
// needs is checked.
std::vector<std::string> given_keys(const std::string& path,
                                    std::span<const std::string> overrides);
// Sets one "key=value" in a configuration that is still being put together. Its value is checked as
// in a file, but not against other keys.
void set_value(Config& config, const std::string& override);

// Every key and its value: what the ranks of a run compare.
struct KeyValue {
    std::string key{}, value{};
};
std::vector<KeyValue> describe_values(const Config& config);
// Every key that decides a number of the training, each on a line "key = value". Keys of the model,
// of budgets, of how state travels and of evaluation decide none; a path is not its contents.
std::string describe_training(const Config& config);

}  // namespace ferry
