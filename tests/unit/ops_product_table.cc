// The text of a table of products, and what is refused as one.
#include "ops/product_table.h"

#include <gtest/gtest.h>

#include "ferry/error.h"
#include "ferry/team.h"

namespace ferry::ops {
namespace {

constexpr const char* kProduct = "tn bf16 to fp32, added, sizes 8 16 32, strides 8 8 16 16";

ProductTable sample() {
    ProductTable table("cuda sm_90, cuBLASLt 13.1.0");
    table.set(kProduct, {1, 0xffffffffffffffff, 0, 4, 5, 6, 7, 0x8000000000000000});
    table.set("nt bf16 to bf16, sizes 1 2 3", {9});
    return table;
}

TEST(ProductTable, its_text_says_all_of_it) {
    const ProductTable table = sample();
    const ProductTable read = ProductTable::parse(table.text(), "t");
    EXPECT_EQ(read.text(), table.text());
    EXPECT_EQ(read.hash(), table.hash());
    EXPECT_EQ(read.made_for(), "cuda sm_90, cuBLASLt 13.1.0");
    ASSERT_NE(read.find(kProduct), nullptr);
    EXPECT_EQ(*read.find(kProduct), *table.find(kProduct));
    EXPECT_EQ(read.find("nn bf16"), nullptr);
    EXPECT_EQ(read.size(), 2);
}

TEST(ProductTable, another_algorithm_is_another_table) {
    ProductTable other = sample();
    other.set(kProduct, {2});
    EXPECT_NE(other.hash(), sample().hash());
}

// The record of a run has the hash of the table that its operations hold, not of a file.
TEST(ProductTable, processors_have_none) {
    Team team(1);
    EXPECT_EQ(table_of(*make_cpu_ops(team)), nullptr);
}

TEST(ProductTable, what_is_no_table_is_refused_with_its_line) {
    const std::string good = sample().text(), heading = good.substr(0, good.find('\n') + 1);
    const auto refused = [](const std::string& text, const std::string& with) {
        try {
            ProductTable::parse(text, "the/file");
            ADD_FAILURE() << text;
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            EXPECT_NE(std::string(error.what()).find(with), std::string::npos) << error.what();
            EXPECT_NE(std::string(error.what()).find("the/file"), std::string::npos);
        }
    };
    refused("", "line 1");
    refused("a table\n", "no table of products");
    refused(good.substr(0, good.size() - 1), "line 3");               // cut short
    refused(good.substr(0, good.size() - 5) + "\n", "no algorithm");  // within a word
    refused(heading + "nt bf16\n", "no product");
    refused(good + good.substr(heading.size()), "second time");
    std::string damaged = good;
    damaged[damaged.size() - 3] = 'x';
    refused(damaged, "no algorithm");
}

}  // namespace
}  // namespace ferry::ops
