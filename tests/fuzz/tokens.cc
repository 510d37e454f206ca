// A token file, and the first sequences of a run on it.
#include "data/tokens.h"

#include <cstring>
#include <vector>

#include "base/checksum.h"
#include "data/token_header.h"
#include "fuzz.h"

namespace {

using namespace ferry;

void run_on(std::string_view text, bool isolates_documents) {
    static const fuzz::Directory directory;
    const std::string name = directory.put("tokens.bin", text);
    fuzz::refused_or_read([&] {
        constexpr int64_t kSequence = 4;
        TokenLoader::Options options{{.sequence = kSequence,
                                      .micro_batch = 1,
                                      .micro_batches = 2,
                                      .evaluation_micro_batches = 1}};
        options.path = name;
        options.held_back = 0.25;
        options.isolates_documents = isolates_documents;
        const TokenLoader loader(options);
        std::vector<int32_t> tokens(kSequence), targets(kSequence);
        std::vector<int32_t> start(isolates_documents ? kSequence : 0), end(start);
        const MicroBatch out{tokens, targets, start, end};
        for (int64_t step = 1; step <= 2; ++step) {
            loader.count_targets(step);
            loader.fill(step, 1, out);
        }
        loader.fill_evaluation(0, out);
    });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    run_on(fuzz::text_of(data, size), false);
    // With the checksum that it should have, too: whoever writes a file can write that.
    if (size <= sizeof(TokenHeader)) return 0;
    std::string sealed(fuzz::text_of(data, size));
    const uint64_t sum = checksum(std::as_bytes(std::span(sealed)).subspan(sizeof(TokenHeader)));
    std::memcpy(sealed.data() + offsetof(TokenHeader, checksum), &sum, sizeof sum);
    run_on(sealed, false);
    run_on(sealed, true);
    return 0;
}
