#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "attached.h"
#include "cgroup.h"
#include "ferry/team.h"
#include "ferry/units.h"
#include "tests/support/temporary_directory.h"
#include "topology/topology.h"

namespace ferry {
namespace {

class Environment {
public:
    Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
    ~Environment() { unsetenv(name_); }

private:
    const char* name_;
};

TEST(Topology, of_this_machine_is_plausible) {
    const Topology machine = discover_topology();
    ASSERT_FALSE(machine.nodes.empty());
    EXPECT_GE(machine.cores(), 1);
    EXPECT_GT(machine.memory_limit_bytes, kMiB);
    EXPECT_GT(machine.memory_left_bytes, 0);
    EXPECT_LT(machine.memory_left_bytes, machine.memory_limit_bytes);
    int64_t memory = 0;
    for (const NumaNode& node : machine.nodes) memory += node.memory_bytes;
    EXPECT_GT(memory, kMiB);
    rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur != RLIM_INFINITY) {
        EXPECT_EQ(machine.memlock_limit_bytes, static_cast<int64_t>(limit.rlim_cur));
    }
}

TEST(Topology, honours_the_affinity_mask) {
    cpu_set_t before, one;
    ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
    size_t unit = 0;
    while (!CPU_ISSET(unit, &before)) ++unit;
    CPU_ZERO(&one);
    CPU_SET(unit, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    const Topology machine = discover_topology();
    sched_setaffinity(0, sizeof(before), &before);
    EXPECT_EQ(machine.cores(), 1);
    EXPECT_EQ(machine.nodes[0].cores, std::vector<int>{static_cast<int>(unit)});
}

TEST(Topology, sees_synthetic_nodes_and_one_unit_a_core) {
    const Environment synthetic("HWLOC_SYNTHETIC", "pack:2 [numa] l3:1 l2:4 core:1 pu:2");
    const Topology machine = discover_topology();
    ASSERT_EQ(machine.nodes.size(), 2u);
    EXPECT_EQ(machine.nodes[0].cores, (std::vector<int>{0, 2, 4, 6}));
    EXPECT_EQ(machine.nodes[1].cores, (std::vector<int>{8, 10, 12, 14}));
    EXPECT_GT(machine.l3_bytes, 0);
}

TEST(Topology, warns_of_a_synthetic_description_that_is_not_one) {
    const Topology real = discover_topology();
    testing::internal::CaptureStderr();
    {
        const Environment synthetic("HWLOC_SYNTHETIC", "garbage");
        EXPECT_EQ(discover_topology().cores(), real.cores());
    }
    EXPECT_THAT(testing::internal::GetCapturedStderr(),
                testing::HasSubstr("HWLOC_SYNTHETIC=\"garbage\""));
    testing::internal::CaptureStderr();
    {
        const Environment synthetic("HWLOC_SYNTHETIC", "pack:2 [numa] core:1 pu:1");
        discover_topology();
    }
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

// hwloc's way to try two nodes on any machine: the synthetic units are real ones.
TEST(Topology, synthetic_nodes_of_this_system_drive_teams) {
    if (discover_topology().cores() < 2) GTEST_SKIP() << "one core";
    const Environment synthetic("HWLOC_SYNTHETIC", "pack:2 [numa] core:1 pu:1");
    const Environment real("HWLOC_THISSYSTEM", "1");
    const Topology machine = discover_topology();
    ASSERT_EQ(machine.nodes.size(), 2u);
    NodeTeams teams(machine, 2);
    teams.each([&](int index, Team& team) {
        team.parallel(3, [&](int64_t) {
            EXPECT_EQ(sched_getcpu(), machine.nodes[static_cast<size_t>(index)].cores[0]);
        });
    });
}

TEST(Topology, counts_no_more_cores_than_the_quota) {
    Topology machine{.nodes = {{.cores = {0, 1, 2, 3}}, {.cores = {4, 5}}}};
    EXPECT_EQ(machine.cores(), 6);
    machine.cpu_quota = 2.5;
    EXPECT_EQ(machine.cores(), 2);
    machine.cpu_quota = 0.5;
    EXPECT_EQ(machine.cores(), 1);
    machine.cpu_quota = 64;
    EXPECT_EQ(machine.cores(), 6);
}

// Two nodes; a GPU and a drive at each, and a drive at neither alone.
TEST(Topology, knows_where_gpus_and_drives_sit) {
    const Environment described("HWLOC_XMLFILE", FERRY_SOURCE_DIR "/tests/unit/two_nodes.xml");
    const Topology machine = discover_topology();
    ASSERT_EQ(machine.nodes.size(), 2u);
    EXPECT_EQ(machine.attached.size(), 5u);  // the network card is neither
    EXPECT_EQ(node_of_device(machine, "0000:17:00.0"), 0);
    EXPECT_EQ(node_of_device(machine, "0000:98:00.0"), 1);
    EXPECT_EQ(node_of_device(machine, "nvme0n1"), 0);
    EXPECT_EQ(node_of_device(machine, "nvme1n1"), 1);
    EXPECT_EQ(node_of_device(machine, "sda"), -1);
    EXPECT_EQ(node_of_device(machine, "nvme7n1"), -1);
    const std::string said = describe(machine);
    EXPECT_THAT(said, testing::HasSubstr("NUMA node 1: 2 cores, 4.00 GiB"));
    EXPECT_THAT(said, testing::HasSubstr("GPU 0000:98:00.0 at node 1"));
    EXPECT_THAT(said, testing::HasSubstr("memory limit "));
}

class FileTree : public testing::Test {
protected:
    void write(const std::string& path, const std::string& text) {
        const std::filesystem::path full = root_ + "/" + path;
        std::filesystem::create_directories(full.parent_path());
        std::ofstream(full) << text << "\n";
    }
    // As sysfs has them: relative to the folder that the link lies in.
    void link(const std::string& path, const std::string& target) {
        const std::filesystem::path full = root_ + "/" + path;
        std::filesystem::create_directories(full.parent_path());
        std::filesystem::create_directory_symlink(target, full);
    }
    const TemporaryDirectory directory_{"/tmp"};
    const std::string root_ = directory_.path();
};

using Drives = FileTree;
TEST_F(Drives, OfAPartitionAreItsDriveAndOfAMappingItsParts) {
    write("devices/pci/nvme0n1/size", "8");
    write("devices/pci/nvme0n1/nvme0n1p1/partition", "1");
    write("devices/pci/nvme1n1/size", "8");
    write("devices/virtual/block/md0/size", "16");
    link("devices/virtual/block/md0/slaves/nvme0n1p1", "../../../../pci/nvme0n1/nvme0n1p1");
    link("devices/virtual/block/md0/slaves/nvme1n1", "../../../../pci/nvme1n1");
    link("devices/virtual/block/dm-0/slaves/md0", "../../md0");
    link("dev/block/259:0", "../../devices/pci/nvme0n1");
    link("dev/block/259:1", "../../devices/pci/nvme0n1/nvme0n1p1");
    link("dev/block/9:0", "../../devices/virtual/block/md0");
    link("dev/block/253:0", "../../devices/virtual/block/dm-0");
    using testing::ElementsAre;
    using topology::drives_of;
    EXPECT_THAT(drives_of(259, 0, root_), ElementsAre("nvme0n1"));
    EXPECT_THAT(drives_of(259, 1, root_), ElementsAre("nvme0n1"));
    EXPECT_THAT(drives_of(9, 0, root_), testing::UnorderedElementsAre("nvme0n1", "nvme1n1"));
    EXPECT_THAT(drives_of(253, 0, root_), testing::UnorderedElementsAre("nvme0n1", "nvme1n1"));
    EXPECT_TRUE(drives_of(0, 42, root_).empty());  // tmpfs, a network, btrfs
}

TEST_F(Drives, OfAPathSayItsNode) {
    struct stat status {};
    ASSERT_EQ(stat(root_.c_str(), &status), 0);
    const auto names = topology::drives_of(major(status.st_dev), minor(status.st_dev), "/sys");
    Topology machine;
    EXPECT_EQ(node_of_path(machine, root_), -1);
    for (const std::string& name : names) machine.attached.push_back({name, false, 3});
    EXPECT_EQ(node_of_path(machine, root_), names.empty() ? -1 : 3);
    EXPECT_EQ(node_of_path(machine, root_ + "/absent"), -1);
}

using Cgroup = FileTree;

TEST_F(Cgroup, v2_takes_the_least_of_the_ancestors) {
    write("a/b/memory.max", "max");
    write("a/memory.max", "1073741824");
    write("a/b/cpu.max", "150000 100000");
    write("a/cpu.max", "max 100000");
    const auto limits = topology::read_cgroup("0::/a/b\n", root_);
    EXPECT_EQ(limits.memory_bytes, kGiB);
    EXPECT_DOUBLE_EQ(limits.cpus, 1.5);
}

// The group uses 700 of 1000 bytes, 250 of them files that the kernel can drop. The group above
// uses 900 of 1100, and none can be dropped.
TEST_F(Cgroup, v2_has_left_what_the_nearest_to_its_limit_has) {
    write("a/memory.max", "1000");
    write("a/memory.current", "700");
    write("a/memory.stat",
          "anon 400\ninactive_file 200\nactive_file 40\nslab_reclaimable 10\nshmem 60");
    EXPECT_EQ(topology::read_cgroup("0::/a\n", root_).memory_left_bytes, 550);
    write("memory.max", "1100");
    write("memory.current", "900");
    const auto limits = topology::read_cgroup("0::/a\n", root_);
    EXPECT_EQ(limits.memory_left_bytes, 200);
    EXPECT_EQ(limits.memory_bytes, 1000);
    write("memory.current", "1200");  // a limit that was lowered
    EXPECT_EQ(topology::read_cgroup("0::/a\n", root_).memory_left_bytes, 0);
}

TEST_F(Cgroup, v1_has_left_what_its_totals_say) {
    write("memory/job/memory.limit_in_bytes", "1000");
    write("memory/job/memory.usage_in_bytes", "900");
    write("memory/job/memory.stat",
          "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n");
    EXPECT_EQ(topology::read_cgroup("5:memory:/job\n", root_).memory_left_bytes, 250);
}

TEST_F(Cgroup, v2_inside_a_container_reads_the_mount_itself) {
    write("memory.max", "4096");
    EXPECT_EQ(topology::read_cgroup("0::/../outside\n", root_).memory_bytes, 4096);
}

TEST_F(Cgroup, v1_names_its_controllers) {
    write("memory/job/memory.limit_in_bytes", "2147483648");
    write("memory/memory.limit_in_bytes", "9223372036854771712");
    write("cpu,cpuacct/job/cpu.cfs_quota_us", "400000");
    write("cpu,cpuacct/job/cpu.cfs_period_us", "100000");
    write("cpu,cpuacct/cpu.cfs_quota_us", "-1");
    write("cpu,cpuacct/cpu.cfs_period_us", "100000");
    const auto limits =
        topology::read_cgroup("5:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/\n", root_);
    EXPECT_EQ(limits.memory_bytes, 2 * kGiB);
    EXPECT_DOUBLE_EQ(limits.cpus, 4);
}

TEST_F(Cgroup, without_files_or_sense_is_no_limit) {
    write("memory.max", "");
    write("cpu.max", "what");
    for (const char* text : {"", "nonsense", "0::/\n", ":::::\n"}) {
        const auto limits = topology::read_cgroup(text, root_);
        EXPECT_EQ(limits.memory_bytes, 0);
        EXPECT_EQ(limits.cpus, 0);
    }
}

// Two nodes of three cores.
Topology two_nodes() {
    Topology machine;
    machine.nodes = {{.os_index = 0, .cores = {0, 1, 2}, .memory_bytes = 3000},
                     {.os_index = 4, .cores = {8, 9, 10}, .memory_bytes = 6000}};
    machine.memory_limit_bytes = 8000;
    machine.memory_left_bytes = 6000;
    machine.memlock_limit_bytes = 64;
    machine.cpu_quota = 4;
    return machine;
}

std::vector<int> cores_of(const Topology& machine) {
    std::vector<int> cores;
    for (const NumaNode& node : machine.nodes)
        cores.insert(cores.end(), node.cores.begin(), node.cores.end());
    return cores;
}

TEST(PartOfCores, IsARunOfThemNodeByNode) {
    const Topology first = with_part_of_cores(two_nodes(), 0, 2),
                   second = with_part_of_cores(two_nodes(), 1, 2);
    EXPECT_EQ(cores_of(first), (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(cores_of(second), (std::vector<int>{8, 9, 10}));
    ASSERT_EQ(second.nodes.size(), 1u);
    EXPECT_EQ(second.nodes[0].os_index, 4);
    EXPECT_EQ(second.nodes[0].memory_bytes, 6000);
    EXPECT_EQ(second.memory_limit_bytes, 8000);
}

TEST(PartOfCores, CutsANodeWhereTheNumbersDoNotMatch) {
    const Topology middle = with_part_of_cores(two_nodes(), 1, 3);
    EXPECT_EQ(cores_of(middle), (std::vector<int>{2, 8}));
    EXPECT_EQ(middle.nodes[0].memory_bytes, 1000);
    EXPECT_EQ(cores_of(with_part_of_cores(two_nodes(), 0, 1)), cores_of(two_nodes()));
    EXPECT_EQ(with_part_of_cores(two_nodes(), 0, 1).cores(), 4);
}

TEST(PartOfCores, LetsSeveralShareOneWhereThereAreFewer) {
    std::vector<int> uses(11);
    for (int part = 0; part < 8; ++part) {
        const Topology mine = with_part_of_cores(two_nodes(), part, 8);
        ASSERT_EQ(cores_of(mine).size(), 1u);
        EXPECT_EQ(mine.cores(), 1);
        ++uses[static_cast<size_t>(cores_of(mine)[0])];
    }
    for (const int core : cores_of(two_nodes())) {
        EXPECT_GE(uses[static_cast<size_t>(core)], 1);
        EXPECT_LE(uses[static_cast<size_t>(core)], 2);
    }
}

TEST(PartOfCores, HasTheReservedOnesWhole) {
    Topology machine = two_nodes();
    machine.reserved = {1, 8};
    const Topology first = with_part_of_cores(machine, 0, 2),
                   second = with_part_of_cores(machine, 1, 2);
    EXPECT_EQ(cores_of(first), (std::vector<int>{0, 1, 2, 8}));
    EXPECT_EQ(first.nodes[0].memory_bytes, 3000);
    EXPECT_EQ(first.nodes[1].memory_bytes, 0);  // nobody computes there
    EXPECT_EQ(cores_of(second), (std::vector<int>{1, 8, 9, 10}));
    machine.reserved = {0, 1, 2, 8, 9};
    for (const int part : {0, 1})  // one to compute on is left, for both
        EXPECT_EQ(cores_of(with_part_of_cores(machine, part, 2)), cores_of(two_nodes()));
}

TEST(PartOfLimits, IsOfWhatBoundsAllProcesses) {
    const Topology mine = with_part_of_limits(two_nodes(), 2);
    EXPECT_EQ(mine.memory_limit_bytes, 4000);
    EXPECT_EQ(mine.memory_left_bytes, 3000);
    EXPECT_EQ(mine.memlock_limit_bytes, 64);  // each process is held to it alone
    EXPECT_EQ(mine.cores(), 2);               // its part of the quota
    EXPECT_EQ(cores_of(mine), cores_of(two_nodes()));
}

}  // namespace
}  // namespace ferry
