// A checkpoint: its manifest, a NUL, and the bytes of its one shard of arrays. Every checksum is
// made right, so that what is left to prove are the sizes: those of the manifest by the shard's
// header.
#include <cstdio>
#include <cstring>
#include <span>

#include "base/checksum.h"
#include "checkpoint/saved.h"
#include "checkpoint/stripe_sums.h"
#include "fuzz.h"

namespace {

using namespace ferry;

void make_checksum_right(std::string& text) {
    const std::string before = "\"checksum\": \"";
    const size_t at = text.rfind(before);
    if (at == std::string::npos || at + before.size() + 16 > text.size()) return;
    const size_t digits = at + before.size();
    char right[17];
    std::snprintf(
        right, sizeof right, "%016llx",
        static_cast<unsigned long long>(checksum(std::as_bytes(std::span(text).first(digits)))));
    text.replace(digits, 16, right);
}

// Of the bytes that lie where the manifest says.
void make_sums_right(checkpoint::Shard& shard, std::span<const std::byte> bytes) {
    int64_t left = shard.bytes;
    for (const checkpoint::ArraySum& array : shard.arrays) left -= array.bytes;
    if (shard.bytes != std::ssize(bytes)) return;
    auto at = static_cast<size_t>(left);
    shard.checksum = checksum(bytes.first(at));
    for (checkpoint::ArraySum& array : shard.arrays) {
        checkpoint::StripeSums sums;
        const auto size = static_cast<size_t>(array.bytes);
        sums.add(bytes.subspan(at, size));
        array.stripes = sums.finish();
        array.checksum = checkpoint::sum_of(array.stripes);
        at += size;
    }
}

// What was opened is as large as it says: each array is read whole.
void read_all(const checkpoint::Saved& saved) {
    for (const checkpoint::Shard& shard : saved.manifest().shards)
        checkpoint::check_shard(saved.path(), shard, [](int64_t) {});
    for (const auto& [name, array] : saved.arrays()) {
        if (array.bytes != array.stored->bytes) std::abort();
        if (std::ssize(array.stripes) != ceil_div(array.bytes, checkpoint::kStripeBytes))
            std::abort();
        std::vector<std::byte> room(static_cast<size_t>(array.bytes));
        saved.read(array, 0, room);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const fuzz::Directory directory;
    const std::string_view all = fuzz::text_of(data, size);
    const size_t end = std::min(all.find('\0'), all.size());
    const std::string_view shard = all.substr(std::min(end + 1, all.size()));
    std::string text(all.substr(0, end));
    make_checksum_right(text);
    fuzz::refused_or_read([&] {
        checkpoint::Manifest manifest = checkpoint::read_manifest(text, "fuzz");
        if (manifest.version != checkpoint::kManifestVersion) return;
        directory.put("model.safetensors", shard);
        for (checkpoint::Shard& one : manifest.shards)
            if (one.file == "model.safetensors")
                make_sums_right(one, std::as_bytes(std::span(shard)));
        directory.put(checkpoint::kManifestName, checkpoint::write_manifest(manifest));
        read_all(checkpoint::Saved(directory.path()));
    });
    return 0;
}
