#include "schema.h"

#include <algorithm>

#include "words.h"

namespace ferry::config {
namespace {

// clang-format off
// The key's text and the field it fills are written once, so they cannot differ.
#define FERRY_KEY(field) #field, +[](Config& c) { return &c.field; }
// The same of a key whose words are in a table of words.h.
#define FERRY_CHOICE(field, words) #field, choice_of<words, [](auto& c) -> auto& { return c.field; }>()
// clang-format on

template <const auto& words, auto field>
constexpr Choice choice_of() {
    return {.count = words.size(),
            .word = [](size_t index) { return words[index].text; },
            .read = [](const Config& c) { return index_of(words, field(c)); },
            .write = [](Config& c, size_t index) { field(c) = words[index].value; }};
}

using enum Form;
constexpr double kMost = 9e15;  // every integer up to here is a double
constexpr Range kPositive = {.low = 1, .high = kMost};
constexpr Range kCount = {.low = 0, .high = kMost};
constexpr Range kUnit = {.low = 0, .high = 1};
constexpr Range kSize = {.low = 0, .high = 9e18};
constexpr Range kWidth = {.low = 1, .high = 1 << 20};
constexpr Range kBlocks = {.low = 1, .high = 1 << 20};
constexpr Range kBlockIndex = {.low = 0, .high = 1 << 20};

const Section kSections[] = {
    {"", "The run as a whole."},
    {"model",
     "A Hugging Face directory, or the shape of a Llama-style decoder: RMSNorm, RoPE, "
     "grouped-query "
     "attention, SwiGLU."},
    {"data", "Where the tokens come from."},
    {"attention",
     "Which earlier tokens a token sees (docs/attention.md). The names are those of DeepSpeed's "
     "`sparse_attention`, whose `mode` is `pattern` here; lengths are in blocks of `block` tokens. "
     "Part of the run's identity."},
    {"batch",
     "One optimizer step sees `micro_batches` x `micro_batch` x `sequence` tokens, whatever the "
     "number of ranks."},
    {"optimizer", "How weights follow gradients."},
    {"schedule",
     "The learning rate over the steps: a warm-up, then one of the kinds. `ferry plan --schedule` "
     "prints it."},
    {"evaluate", "Loss on the held-back end of the token file. It never changes the training."},
    {"budgets", "What each tier may hold. What does not fit is refused before the first step."},
    {"swap", "How the state travels between the tiers. Nothing here changes a number of the run."},
    {"checkpoint", "What survives the process."},
    {"io", "How NVMe paths are read and written. Nothing here changes a number of the run."},
    {"zero",
     "Several ranks; docs/ranks.md says how to start them. `budgets.host`, `threads` and the sizes "
     "in `budgets.nvme` are a host's, and its ranks get equal parts. `budgets.device` is a "
     "rank's."},
    {"parallel", "What several ranks do together. Part of the numerics record."},
    {"numerics", "What orders floating-point operations. Part of the numerics record."},
};

// clang-format off
const Key kKeys[] = {
    {FERRY_KEY(steps), integer, "optimizer steps of the run", kPositive, {}, true},
    {FERRY_KEY(seed), integer, "seeds every random number: initial weights, order of the sequences, stochastic rounding", {.low = 0, .high = 4294967295.0}},
    {FERRY_CHOICE(device, kDevices), choice, "computes on this machine's processors, or on its first GPU; part of the numerics record"},
    {FERRY_CHOICE(precision, kPrecisions), choice, "compute type. All three keep fp32 sums and master weights; fp16 adds dynamic loss scaling"},
    {FERRY_KEY(clip_norm), number, "limit of the gradient's global norm; 0: no clipping", {.low = 0, .high = 1e30}},
    {FERRY_KEY(freeze), texts, "glob patterns (`*`, `?`) over tensor names; a tensor that matches is not trained"},
    {FERRY_CHOICE(on_nonfinite, kNonfinite), choice, "what a NaN or Inf in loss or gradient does: stop the run, or skip the step; 20 skipped in a row stop the run, in every precision. With fp16 a gradient that overflows always skips the step, and a forward pass that does always stops the run"},
    {FERRY_KEY(threads), integer, "worker threads. `auto`: one for each core that is not reserved; a rank of several GPUs leaves two more to the exchanges", {.low = 1, .high = 4096}, true},
    {FERRY_KEY(reserved_cores), integers, "cores, by the system's numbers, that workers leave to the threads of I/O and copies", {.low = 0, .high = 65535}},
    {FERRY_CHOICE(hash_every, kHashes), choice, "when ferry hashes all weights and moments: once at the end, or every step"},

    {FERRY_KEY(model.path), text, "directory of a Hugging Face model: llama, mistral, qwen2, qwen3, gpt2 (docs/models.md). Its `config.json` then replaces the keys of the shape, from `hidden` on"},
    {FERRY_KEY(model.load), boolean, "start from the weights in `path`; `false`: from random ones by the family's rule"},
    {FERRY_CHOICE(model.dropout, kDoubts), choice, "what to do where `config.json` asks for dropout, which ferry does not do"},
    {FERRY_KEY(model.hidden), integer, "width of the residual stream", kWidth, {}, true},
    {FERRY_KEY(model.layers), integer, "decoder blocks", {.low = 1, .high = 65536}, {}, true},
    {FERRY_KEY(model.heads), integer, "query heads", {.low = 1, .high = 65536}, {}, true},
    {FERRY_KEY(model.kv_heads), integer, "key and value heads, a divisor of `heads`. `auto`: as many as `heads`", {.low = 1, .high = 65536}, true},
    {FERRY_KEY(model.head_dim), integer, "elements a head, even. `auto`: `hidden` / `heads`, which must divide", {.low = 1, .high = 65536}, true},
    {FERRY_KEY(model.intermediate), integer, "width of the MLP", kWidth, {}, true},
    {FERRY_KEY(model.vocab), integer, "tokens that the embedding knows; byte-level files need 256", {.low = 1, .high = 1 << 30}},
    {FERRY_KEY(model.tie_embeddings), boolean, "embedding and head are one tensor"},
    {FERRY_KEY(model.rope_theta), number, "base of the rotary position frequencies", {.low = 1, .high = 1e15}},
    {FERRY_KEY(model.norm_eps), number, "added to the mean square in RMSNorm", {.low = 1e-30, .high = 1}},

    {FERRY_KEY(data.tokens), text, "token file written by `ferry data`", {}, {}, true},
    {FERRY_CHOICE(data.small_vocabulary, kDoubts), choice, "what to do where weights are loaded and the tokens' vocabulary is half the model's or less, as of bytes or of another tokenizer; smaller differences, padded tables, and random starts are never refused"},
    {FERRY_KEY(data.held_back), number, "fraction of the tokens, at the end of the file, that only evaluation sees", {.low = 0, .high = 1, .below_high = true}},
    {FERRY_KEY(data.isolate_documents), boolean, "documents of the token file (`ferry data --documents`, `--separator`) do not see each other: attention ends at their borders, positions begin anew with each, and its last token has no target. What a row's end cuts off goes on in the next row as a document of its own"},

    {FERRY_CHOICE(attention.pattern, kPatterns), choice, "`dense`: all earlier tokens. `window`: the blocks just before. `fixed` (Sparse Transformer): windows side by side, and of each the last blocks seen by all that follow. `bigbird`: window, first blocks and random ones. `longformer` (also `bslongformer`): window, and global blocks that see all and are seen by all. `variable`: windows of your lengths, and global blocks. `layout`: the blocks of a file. A token never sees a later one"},
    {FERRY_KEY(attention.block), integer, "tokens of a block: 16, 32, 64 or 128. Kernels know 64 and 128: with smaller ones a block of 64 is seen where any part of it is. A layout's file has its own", {.low = 16, .high = 128}},
    {FERRY_KEY(attention.layers), integers, "blocks of the model that have the pattern, from 0; the others are dense. Empty: all", {.low = 0, .high = 65535}},
    {FERRY_KEY(attention.different_layout_per_head), boolean, "each query head has random blocks, or global blocks of `fixed`, of its own"},
    {FERRY_KEY(attention.different_layout_per_layer), boolean, "each layer has random blocks of its own"},
    {FERRY_CHOICE(attention.attention, kDirections), choice, "`bidirectional` is read as in DeepSpeed and then cut by the causal mask: of random blocks those behind a row are drawn, and lost"},
    {FERRY_KEY(attention.num_sliding_window_blocks), integer, "`window`, `bigbird`, `longformer`: width of the window about a block. The half of it before the block counts, and the block; one wider than the sequence is cut", kBlocks},
    {FERRY_KEY(attention.num_local_blocks), integer, "`fixed`: blocks of a window", kBlocks},
    {FERRY_KEY(attention.num_global_blocks), integer, "`fixed`: blocks of each window, at its end, that all later ones see, a divisor of `num_local_blocks`. `bigbird`: first blocks of the sequence, which all see", kBlocks},
    {FERRY_KEY(attention.num_different_global_patterns), integer, "`fixed`, with `different_layout_per_head`: so many places of the global blocks in their window, head after head", kBlocks},
    {FERRY_KEY(attention.num_random_blocks), integer, "`bigbird`, `variable`: random blocks of each row of blocks, drawn by `seed`. `auto`: 1 for `bigbird`, 0 for `variable`", kBlockIndex, true},
    {FERRY_KEY(attention.local_window_blocks), integers, "`variable`: blocks of the first window, of the second, ...; the last number goes on", kBlocks},
    {FERRY_KEY(attention.global_block_indices), integers, "`longformer`, `variable`: global blocks, or where runs of them begin; those that a sequence does not have are none", kBlockIndex},
    {FERRY_KEY(attention.global_block_end_indices), integers, "`longformer`, `variable`: one more than the last block of each run. Empty: each is one block", kBlockIndex},
    {FERRY_KEY(attention.horizontal_global_attention), boolean, "`fixed`, `variable`, with `attention` `bidirectional`: global blocks see all blocks before them too"},
    {FERRY_KEY(attention.layout), text, "`layout`: a file that tools/write_layout.py writes of a NumPy array (docs/attention.md)"},
    {FERRY_KEY(attention.allow_empty_rows), boolean, "take a layout in which some row of blocks sees none: the attention's output there is 0, and so is its gradient"},

    {FERRY_KEY(batch.sequence), integer, "tokens a sequence", kWidth, {}, true},
    {FERRY_KEY(batch.micro_batch), integer, "sequences that a kernel works on at once", kWidth},
    {FERRY_KEY(batch.micro_batches), integer, "micro-batches of one optimizer step, a multiple of the ranks; each rank takes an equal share. Ranks that share sequences or tensors (`parallel`) count as one", kWidth},

    {FERRY_CHOICE(optimizer.method, kMethods), choice, "AdamW, Adam, SGD, Lion, Adagrad, 1-bit Adam, 0/1 Adam, or Muon (Jordan et al. 2024, as torch.optim.Muon): it orthogonalises the updates of the blocks' matrices, and AdamW updates all else, which are embeddings, head, norms and biases. State a parameter besides the fp32 weight: 8 B for the first two and for what Muon leaves to AdamW, 4 B for the others and Muon's matrices, none for `sgd` without momentum. The device that computes the model orthogonalises; with several ranks each updates whole matrices. `onebit_adam` (Tang et al. 2021) is for several ranks: AdamW for `freeze_step` updates, and then ranks exchange the first moment as signs. `zeroone_adam` (Lu et al. 2022), for those too, changes the second moment at growing intervals and exchanges signs from early on (docs/communication.md)"},
    {FERRY_KEY(optimizer.lr), number, "peak learning rate", {.low = 0, .high = 1e6}},
    {"optimizer.betas", +[](Config& c) { return Pair{&c.optimizer.beta1, &c.optimizer.beta2}; }, pair,
     "decay of the first and the second moment: `adamw`, `adam`, `lion`, `muon` (of AdamW), `onebit_adam`, `zeroone_adam`. For `lion` the default is `[0.9, 0.99]`", {.low = 0, .high = 1, .below_high = true}},
    {FERRY_KEY(optimizer.eps), number, "added to the square root of the second moment: `adamw`, `adam`, `muon` (of AdamW), `onebit_adam`, `zeroone_adam`, `adagrad` (default there 1e-10). Values below 2^-50 / sqrt(1 - beta2), for `adagrad` 2^-50, are raised to that, with a warning", {.low = 0, .high = 1e30}},
    {FERRY_KEY(optimizer.weight_decay), number, "`adamw`, `lion`, `muon`, `onebit_adam`, `zeroone_adam`: decoupled, times the learning rate. The others: an L2 term of the gradient", {.low = 0, .high = 1e6}},
    {FERRY_KEY(optimizer.momentum), number, "`sgd`, where 0 means no momentum and no state; `muon` (default there 0.95), as a running mean of the gradient", {.low = 0, .high = 1, .below_high = true}},
    {FERRY_KEY(optimizer.nesterov), boolean, "`sgd` with momentum, `muon` (default there `true`): look ahead"},
    {FERRY_KEY(optimizer.initial_accumulator), number, "`adagrad`: start of its sum of squares", {.low = 0, .high = 1e30}},
    {FERRY_KEY(optimizer.ns_steps), integer, "`muon`: iterations of Newton-Schulz", {.low = 1, .high = 99}},
    {"optimizer.ns_coefficients", +[](Config& c) { auto& n = c.optimizer.ns_coefficients; return Triple{&n.a, &n.b, &n.c}; }, triple,
     "`muon`: a, b and c of an iteration x' = a x + b (x x^T) x + c (x x^T)^2 x", {.low = -100, .high = 100}},
    {FERRY_CHOICE(optimizer.ns_products, kProducts), choice, "`muon`: type of the factors of Newton-Schulz's products; sums are fp32. `bf16` rounds each factor, which on a GPU with tensor cores is about ten times as fast and ends 1e-2 from `fp32` in norm; torch.optim.Muon rounds all of it. Part of the numerics record"},
    {FERRY_CHOICE(optimizer.adjust_lr, kAdjustments), choice, "`muon`: what the learning rate of a matrix is multiplied by. `original`: sqrt(max(1, rows / columns)). `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), so that AdamW's rates and decays serve. `spectral_unclamped`: sqrt(rows / columns)"},
    {FERRY_KEY(optimizer.adamw_lr), number, "`muon`: peak learning rate of what AdamW updates. `auto`: `lr`", {.low = 0, .high = 1e6}, true},
    {FERRY_KEY(optimizer.adamw_tensors), texts, "`muon`: glob patterns (`*`, `?`) over tensor names; a matrix that matches is AdamW's too"},
    {FERRY_KEY(optimizer.freeze_step), integer, "`onebit_adam`: updates of AdamW, with gradients exchanged in full, before the second moment stays as it is and momentum is exchanged as signs, in blocks of `zero.compress.block`. The paper takes 15 to 25 % of the steps, at the least until the learning rate's warm-up is over; below `schedule.warmup_steps` ferry warns. 0: not set, which `onebit_adam` refuses", {.low = 0, .high = kMost, .remedy = "set it to 15 to 25 % of the steps with onebit_adam, and leave it out with another method"}},
    {FERRY_KEY(optimizer.var_freeze_step), integer, "`zeroone_adam`: the last update that may change the second moment. The paper sets it to the end of the learning rate's warm-up; before it ferry warns. 0: not set, which `zeroone_adam` refuses", {.low = 0, .high = kMost, .remedy = "set it to schedule.warmup_steps or more with zeroone_adam, and leave it out with another method"}},
    {FERRY_KEY(optimizer.var_update_scaler), integer, "`zeroone_adam`: updates that change the second moment at one distance, before it doubles: so many 1 apart, as many 2 apart, then 4, and so on. They exchange gradients in full, and all others momentum as signs, in blocks of `zero.compress.block`", kPositive},
    {FERRY_KEY(optimizer.local_step_scaler), integer, "`zeroone_adam`: updates after `var_freeze_step` before the distance between exchanges doubles, and again after as many, up to `local_step_clipper`", kPositive},
    {FERRY_KEY(optimizer.local_step_clipper), integer, "`zeroone_adam`: the most updates from one exchange to the next. Between them each rank goes on alone with weights of its own: at `zero.stage` 0. 1: no such local steps. The paper takes 16", kPositive},
    {FERRY_KEY(optimizer.decay_norms_and_biases), boolean, "norm weights and biases decay too"},
    {FERRY_CHOICE(optimizer.moments, kMoments), choice, "type of the stored moments; part of the numerics record. `bf16` rounds them stochastically by bits of `seed`. It stores and moves 2 B less for each moment of a parameter, at the price of noise. `int8` keeps codes in blocks of 256 with a scale each, as torchao's AdamW8bit does: about 3 B less for each moment. Norms, biases, tensors of fewer than 4,096 elements or of no whole blocks, and those of `fp32_moments` keep fp32 moments (docs/numerics.md)"},
    {FERRY_KEY(optimizer.fp32_moments), texts, "with `moments` `int8`: glob patterns (`*`, `?`) over names of tensors that keep fp32 moments. The default names the input embeddings of every family, tied ones too; a head of its own is coded"},
    {FERRY_CHOICE(optimizer.master, kMasters), choice, "`split` stores 16 bits beside the weight of 16 bits that every step has, and no fp32 master: 2 B less a parameter to store and to move. Beside bf16 it is exact, and the weight is rounded half up instead of to even. Beside fp16 it is exact for a weight of 2^-16 or more in magnitude, and within 2^-39 below ([decision 41](decisions/0041-split-master-of-fp16.md)). Not with `precision` `fp32`; part of the numerics record"},

    {FERRY_CHOICE(schedule.kind, kSchedules), choice, "after the warm-up: stay (`constant`); fall as a line, as a half cosine, or as a line over the last steps only (`wsd`); rise and fall between final fraction and peak, counted from step 0 (`one_cycle`, `warmup_decay`)"},
    {FERRY_KEY(schedule.warmup_steps), integer, "steps in which the rate climbs. It has its peak at the last of them, with `one_cycle` one step later, with `warmup_decay` two", kCount},
    {FERRY_KEY(schedule.total_steps), integer, "steps until the fall has ended; the last of them is the last above the end of the fall. `auto`: `steps`, or the warm-up if that is longer", kPositive, true},
    {FERRY_KEY(schedule.decay_steps), integer, "`wsd`: the falling steps at the end. `auto`: a tenth of `total_steps`, at most what the warm-up leaves", kPositive, true},
    {FERRY_KEY(schedule.final_fraction), number, "fraction of the peak that is left after `total_steps`, with `warmup_decay` after one more", kUnit},
    {FERRY_KEY(schedule.log_warmup), boolean, "the warm-up climbs as the logarithm of the step; not for `one_cycle`"},

    {FERRY_KEY(evaluate.every), integer, "steps between evaluations; 0: only before the first step and after the last", kCount},
    {FERRY_KEY(evaluate.micro_batches), integer, "held-back micro-batches of one evaluation; 0, with `every` 0 too: no evaluation", kCount},

    {"budgets.device", +[](Config& c) { return &c.budgets.device_bytes; }, bytes, "device memory: weights in use, activations, gradients. On a GPU it is all that the process holds there, with its context and libraries", kSize},
    {"budgets.host", +[](Config& c) { return &c.budgets.host_bytes; }, bytes, "host memory: optimizer state, staging buffers, block inputs that the device has no room for", kSize},
    {FERRY_KEY(budgets.nvme), volumes, "directories on NVMe, each a path or `{\"path\": ..., \"size\": ...}`. `size` is `unlimited` when left out. `endurance_tbw`, the terabytes the drive is rated for, adds its wear to plan and summary. A directory on tmpfs is host memory beside `budgets.host`, held to what the machine has left"},
    {FERRY_KEY(budgets.ranks_per_host), integer, "ranks that share a host, and so its budgets and its link to the network, where `ferry plan` is not told by `--ranks-per-host`. A run counts them itself, and warns where they differ. `auto`: `zero.ranks_per_host` where that is above 1 and `--network` or `--layouts` joins hosts; else all ranks, with `--network` one", {.low = 1, .high = 65536}, true},

    {FERRY_KEY(swap.chunk_elements), integer, "elements of one optimizer chunk, a multiple of 4,096. `auto`: the planner chooses", {.low = 1, .high = 1LL << 32}, true},
    {FERRY_KEY(swap.chunks_at_once), integer, "how many optimizer chunks ferry reads from storage at a time; it writes as many. A chunk lies on one path, so raise it where one path is several drives (RAID 0): to their number. Each takes buffers, together at most a quarter of `budgets.host`. `auto`: as the machine file says; without one the number of drives below `budgets.nvme`, where beside a GPU a tmpfs counts as four", {.low = 1, .high = 64}, true},
    {FERRY_KEY(swap.groups), integer, "groups of a rank's micro-batches. Each group passes through all layers before the next begins: more groups need less memory and move weights and gradients more often. `auto`: the fewest that fit; on one rank with a limited `budgets.device` the number with the shortest predicted step", kPositive, true},
    {FERRY_CHOICE(swap.speculate, kSpeculate), choice, "speculative updates, made before the clip factor is known and rolled back where it is not 1: as many as the planner finds useful, none, or all that can be. With a split master a chunk whose weight stays on the device cannot"},
    {FERRY_KEY(swap.expect_clipped), number, "fraction of the steps that you expect `clip_norm` to clip: 0 for a run past its warm-up that seldom clips, 1 for one that clips always. The planner makes the mean step short for that mixture: with few clipped steps it saves more activations on the device, with many more optimizer state. A wrong value costs time, never a number. A run of 20 steps or more prints at its end what the measured fraction would have saved. `auto`: unknown, so a plan may cost steps without speculation 1 % at most; 0 where `clip_norm` is 0. No effect where `device` is `cpu`", {.low = 0, .high = 1}, true},
    {FERRY_KEY(swap.state_on_nvme), number, "least fraction of the optimizer state on NVMe. `auto`: what `budgets.host` leaves over", {.low = 0, .high = 1}, true},
    {FERRY_KEY(swap.state_on_device), number, "greatest fraction of the optimizer state on the device, which then updates it. `swap.state_on_nvme` goes first. `auto`: 1 on a GPU (of several ranks from `zero.stage` 1 on), 0 where `device` is `cpu`", {.low = 0, .high = 1}, true},
    {FERRY_KEY(swap.save_attention), integer, "blocks that save the output of their attention on the device, so that backward does not compute it again. It pays most at long sequences. A number above the blocks: all. `auto`: as many as shorten the predicted step more than state or weights in the same memory would; none where `device` is `cpu` and `budgets.device` unlimited", {.low = 0, .high = 65536}, true},
    {FERRY_KEY(swap.save_mlp), integer, "blocks that save the output of their MLP's gate and up products on the device. These are the dearest part of recomputation and take the most memory. A number above the blocks: all. `auto`: as for `save_attention`", {.low = 0, .high = 65536}, true},
    {FERRY_KEY(swap.save_projections), integer, "blocks that save what the products around their attention give on the device: queries, keys and values, and the residual behind attention. A number above the blocks: all. `auto`: as for `save_attention`; none where ranks share sequences or tensors (`parallel.sequence`, `parallel.tensor`)", {.low = 0, .high = 65536}, true},
    {FERRY_KEY(swap.save_inputs), integer, "blocks whose inputs stay on the device until backward; the others' go to host memory and come back. A number above the blocks: all. `auto`: all that fit; beside a GPU fewer where saved activations, weights or state shorten the predicted step more", {.low = 0, .high = 65536}, true},
    {FERRY_KEY(swap.verify), boolean, "check the checksum of everything that comes back from NVMe"},

    {FERRY_KEY(checkpoint.durable_steps), boolean, "the run survives a kill and a power failure. `ferry train --resume` repeats the step under way and at most the two before it, with the same bits. All optimizer state is then on NVMe, in twice the space, and the files stay after the run. Several ranks then update after the clip factor is known alone"},
    {FERRY_KEY(checkpoint.dir), text, "directory for checkpoints (docs/checkpoints.md), made where it is missing. One is written at the end of the run, also when a signal ends it; `ferry train --resume` goes on from it. Without it there are none"},
    {FERRY_KEY(checkpoint.every), period, "how often one is written besides: every so many steps (`100`), or by time (`\"30s\"`, `\"10min\"`, `\"2h\"`). 0: at the end only", {.low = 0, .high = kMost}},
    {FERRY_KEY(checkpoint.keep.last), integer, "the newest checkpoints stay", kPositive},
    {FERRY_KEY(checkpoint.keep.every), integer, "so do those of steps that this number divides; 0: none for that", kCount},
    {FERRY_KEY(checkpoint.keep.best), integer, "and as many as this of the lowest held-back loss; it needs `evaluate.every`", kCount},
    {"checkpoint.memory", +[](Config& c) { return &c.checkpoint.memory_bytes; }, bytes, "host memory, within `budgets.host`, for a checkpoint on its way to disk: training goes on once all of it is there or written. `auto`: what the plan and the machine leave, at most a checkpoint's size. The ranks of a host share it. `0`: training waits until all is written", {.low = 0, .high = kMost}, true},
    {FERRY_CHOICE(checkpoint.on_failure, kUnsaved), choice, "what a checkpoint that cannot be written does, as on a full disk: the run goes on, warns, and ends with code 4 unless a later one was written; or it stops. Older checkpoints stay either way"},

    {FERRY_CHOICE(io.backend, kBackends), choice, "`auto`: io_uring where the kernel allows it, else POSIX threads"},
    {FERRY_KEY(io.block_bytes), bytes, "largest single read or write, a multiple of 4 KiB. Where several workers copy (tmpfs) writes go whole", {.low = 4096, .high = 1 << 30}},
    {FERRY_KEY(io.queue_depth), integer, "operations in flight on each ring", {.low = 1, .high = 4096}},
    {FERRY_KEY(io.rings), integer, "queues to the kernel of each path, with a thread each", {.low = 1, .high = 64}},
    {FERRY_KEY(io.direct), boolean, "O_DIRECT; `false` goes through the page cache"},
    {FERRY_CHOICE(io.leftovers, kLeftovers), choice, "files that a killed run left on a path: remove them, take them over (which saves laying them out), or stop. Files of a run with other numerics, of an older ferry, or with a damaged header stop the run unless `_any` is said; so does the state that `checkpoint.durable_steps` keeps"},

    {FERRY_KEY(zero.stage), integer, "what the ranks share out instead of each holding all of it: 0 nothing; 1 and 2 optimizer state and gradients; 3 weights too. Changes no number of the run", {.low = 0, .high = 3}},
    {FERRY_CHOICE(zero.compress.gradients, kGradientCodecs), choice, "how gradients travel to the owners of their shards: in `numerics.wire`, or as codes in blocks with a scale each (docs/communication.md). Part of the numerics record of several ranks"},
    {FERRY_CHOICE(zero.compress.weights, kWeightCodecs), choice, "the same of the weights that `zero.stage` 3 gathers. Every rank then computes with what the codes say, their owner too"},
    {FERRY_KEY(zero.compress.block), integer, "elements that share a scale, a power of two", {.low = 64, .high = 2048}},
    {FERRY_KEY(zero.ranks_per_host), integer, "neighbouring ranks that share a host, a divisor of the ranks. Gradients as codes are then added within the host first and coded once more on their way to the other hosts; `zero.second_shard` needs it. 1, or all of the ranks: every rank exchanges with every other. Part of the numerics record where gradients are coded, wherever the ranks really are", {.low = 1, .high = 4096}},
    {FERRY_CHOICE(zero.second_shard, kSecondShards), choice, "`host`: at `zero.stage` 3 the ranks of a host keep, from a layer's first visit in a step to its last, what they gathered of its weights once more, each a part, so that only the first gather crosses the network (docs/communication.md). Changes no number of the run"},
    {FERRY_KEY(zero.timeout_seconds), number, "how long a rank waits for the others in one exchange, the slowest rank's lag included, before it ends the run", {.low = 0, .high = 1e9, .above_low = true}},

    {FERRY_KEY(parallel.sequence), integer, "ranks that share each sequence, a divisor of the ranks and of `batch.sequence`: each has a contiguous part of its tokens, and of attention some heads over all of them, or all heads over its own in a ring (docs/attention.md)", {.low = 1, .high = 4096}},
    {FERRY_CHOICE(parallel.sequence_order, kSequenceOrders), choice, "what these ranks send each other for attention. `heads`: each has all tokens of some heads. `ring`: each has its tokens of all heads, and keys and queries go round; on a GPU in 16 bits alone, where the build has Triton. `auto`: a ring on the CPU where the ranks do not divide the heads of keys, else heads. Part of the numerics record"},
    {FERRY_KEY(parallel.tensor), integer, "neighbouring ranks that share each block's tensors, a divisor of the ranks: each has some heads, a part of the MLP and some rows of the vocabulary's tables, and all add up what these give (docs/parallelism.md)", {.low = 1, .high = 4096}},
    {FERRY_KEY(parallel.pipeline), integer, "stages that the blocks are cut into, a divisor of the ranks: each has the same number of ranks, and micro-batches pass through them one behind the other (docs/parallelism.md)", {.low = 1, .high = 4096}},
    {FERRY_CHOICE(parallel.schedule, kPipelineSchedules), choice, "the order in which those stages take micro-batches. `auto`: of those that fit the budgets the fastest, as all stages are simulated together; the log says which, and why. With one virtual stage it is one of `1f1b`, `zero_bubble` and `round_robin`, else one of `interleaved` and `round_robin`; with `virtual_stages` `auto` all four. `1f1b`: one goes back for each that goes forward. `zero_bubble`: backward computes the gradients of inputs first, and those of weights where a stage would wait for others (zero-bubble H1). It takes more memory of the device, and changes no bit. `interleaved`: each stage has several virtual stages, and a group of micro-batches comes to each rank as often. `round_robin`: all micro-batches go through one virtual stage of a rank before the next, so that weights which stream move once forward and once backward"},
    {FERRY_KEY(parallel.virtual_stages), integer, "runs of blocks that each stage has with `parallel.schedule` `interleaved` (2 or more), `round_robin` and `auto`: the first run is the first stage's, the next one the second's, and so on, round and round. `auto`: chosen with the schedule, as simulated, of 1, 2, 4 and 8 that divide a stage's blocks, and with `round_robin` also one block a run. In a long step, where blocks x micro-batches of a replica x stages are more than 2,048, each stage is simulated alone, and `auto` takes 1 where the schedule admits it (docs/parallelism.md). Part of the numerics record, and so is what `auto` chooses: set the number that the log says where a run is to be repeated elsewhere", {.low = 1, .high = 4096}, true},

    {FERRY_CHOICE(numerics.residual, kNarrow), choice, "type of the residual stream, fp32 or the compute type. `auto`: the compute type, with fp16 fp32"},
    {FERRY_CHOICE(numerics.wire, kNarrow), choice, "type in which gradients travel. `auto`: the compute type"},
    {FERRY_CHOICE(numerics.attention, kAttentions), choice, "`auto`: cuDNN's on a GPU where ferry is built with it and it has a deterministic kernel (16-bit types, heads of 64 or 128 elements), else ferry's own. `ferry`: always its own, which never rounds probabilities"},
    {FERRY_KEY(numerics.head_tile), integer, "tokens whose logits exist at once. `auto`: 1024; on a GPU up to 4096 while their logits are at most 2^27 (5 * 2^26 where the table of words is a twelfth of the model or more), or as many as the MLP's activations of a micro-batch (`mlp_tile`)", kPositive, true},
    {FERRY_KEY(numerics.mlp_tile), integer, "tokens of a block whose norms and MLP activations exist at once. `auto`: a whole micro-batch of up to 16384 tokens; a longer one in equal tiles of no more", kPositive, true},
    {FERRY_KEY(numerics.products), text, "on a GPU: a file that `ferry bench kernels --tune` writes of the algorithms that do this configuration's products fastest. Products that are not in it, and all of them without one, are done by cuBLASLt's first choice. Another table rounds otherwise: its hash is in the record"},
};
// clang-format on
#undef FERRY_KEY
#undef FERRY_CHOICE

}  // namespace

std::span<const Key> schema() { return kKeys; }
std::span<const Section> sections() { return kSections; }

const Key* find_key(std::string_view path) {
    const Key* found = std::find_if(std::begin(kKeys), std::end(kKeys),
                                    [path](const Key& key) { return key.path == path; });
    return found == std::end(kKeys) ? nullptr : found;
}

}  // namespace ferry::config
