//! A real S3 server in this process; its clients are processes of their own, with the usual environment variables.

#![allow(clippy::unwrap_used, missing_docs)]

mod shards;

use std::env;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ferrotitan_checkpoint::comm::{BoxError, threads};
use ferrotitan_checkpoint::mesh::{Degrees, Layout, Parts, View};
use ferrotitan_checkpoint::{
    Checkpoint, Dtype, Item, LoadOptions, SaveOptions, Saver, Source, Store, Which, load, steps,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::access::S3Access;
use s3s::auth::SimpleAuth;
use s3s::dto::{PutObjectInput, UploadPartInput};
use s3s::service::S3ServiceBuilder;
use s3s::{S3Error, S3ErrorCode, S3Request, S3Result};
use shards::Global;
use tokio::net::TcpListener;

const CLIENT: &str = "FERROTITAN_CHECKPOINT_TEST_CLIENT";
const ADDRESS: &str = "s3://bucket/some/run";

/// Takes so many bytes, and then no more.
struct Quota(Arc<AtomicU64>);

impl Quota {
    fn take(&self, bytes: Option<i64>) -> S3Result<()> {
        let bytes = bytes.unwrap_or(0).unsigned_abs();
        let left = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(bytes));
        // Servers have codes of their own for it, and the status of a bad request.
        left.map(drop).map_err(|_| S3Error::with_message(S3ErrorCode::InvalidRequest, "the bucket is full"))
    }
}

#[async_trait::async_trait]
impl S3Access for Quota {
    async fn put_object(&self, request: &mut S3Request<PutObjectInput>) -> S3Result<()> {
        self.take(request.input.content_length)
    }

    async fn upload_part(&self, request: &mut S3Request<UploadPartInput>) -> S3Result<()> {
        self.take(request.input.content_length)
    }
}

/// In the test's own process: serves a bucket that takes `quota` bytes, and runs this test once more as a client with
/// this secret. In the client: gives its work to do.
fn is_client(test: &str, quota: u64, secret: &str) -> bool {
    if env::var_os(CLIENT).is_some() {
        return true;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("bucket")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(folder.path()).unwrap());
    service.set_auth(SimpleAuth::from_single("the-key", "the-secret"));
    service.set_access(Quota(Arc::new(AtomicU64::new(quota))));
    let service = service.build();
    runtime.spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let service = service.clone();
            tokio::spawn(async move {
                let _ = Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(socket), service).await;
            });
        }
    });
    let mut client = Command::new(env::current_exe().unwrap());
    client.args([test, "--exact", "--nocapture"]).env(CLIENT, "1");
    client.env("AWS_ENDPOINT_URL", endpoint).env("AWS_REGION", "us-east-1");
    client.env("AWS_ACCESS_KEY_ID", "the-key").env("AWS_SECRET_ACCESS_KEY", secret);
    let mut client = client.spawn().unwrap();
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = client.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > Duration::from_secs(100) {
            client.kill().unwrap();
            panic!("the client was still running");
        }
        thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success());
    false
}

fn model(step: u64) -> Vec<Global> {
    // One of several requests, one of one.
    vec![Global::new("large", Dtype::F32, &[5, 1 << 20], step), Global::new("small", Dtype::Bf16, &[7, 3], step)]
}

fn layout(global: &Global) -> Layout {
    Layout::replicated(&global.shape).shard(View::TP, 0, Parts::Even).unwrap()
}

/// Saves steps one after the other, from two ranks; gives the first error.
fn save(steps: &[u64], keep_latest_k: usize) -> Result<(), String> {
    let two = Degrees { tp: 2, ..Degrees::default() };
    let saved = threads::run(two, &threads::Options::default(), |mesh| -> Result<_, BoxError> {
        let options = SaveOptions { keep_latest_k, ..SaveOptions::default() };
        let mut saver = Saver::new(Store::open(ADDRESS)?, mesh.clone(), options);
        for &step in steps {
            let items: Vec<_> = model(step).iter().map(|global| global.item(&layout(global), &mesh)).collect();
            if let Err(error) = saver.save(step, items, serde_json::Value::Null) {
                return Ok(Err(error.to_string()));
            }
        }
        Ok(saver.finish().map(drop).map_err(|error| error.to_string()))
    });
    saved.unwrap().into_iter().collect()
}

#[test]
fn saves_loads_lists_and_deletes() {
    if !is_client("saves_loads_lists_and_deletes", 1 << 30, "the-secret") {
        return;
    }
    let store = Store::open(ADDRESS).unwrap();
    assert!(steps(&store).unwrap().is_empty());
    save(&[1, 2, 30], 2).unwrap();
    assert_eq!(steps(&store).unwrap(), [2, 30]);
    assert_eq!(store.folders("").unwrap(), ["step-2", "step-30"]);
    let exists = save(&[30], 0).unwrap_err();
    assert!(exists.contains("step 30 exists already in s3://bucket/some/run"), "{exists}");

    let checkpoint = Checkpoint::open(&store, Which::Latest).unwrap();
    checkpoint.verify(|_| ()).unwrap();
    for global in model(30) {
        assert!(global.is_in(&checkpoint).unwrap());
    }
    // By columns, where it was saved by rows.
    let three = Degrees { dp_shard: 3, ..Degrees::default() };
    threads::run(three, &threads::Options::default(), |mesh| -> Result<(), BoxError> {
        for global in model(30) {
            let columns = Layout::replicated(&global.shape).shard(View::DP_SHARD, 1, Parts::Even)?;
            let item = global.blank(&columns, &mesh);
            let given = Item::new(&item.name, columns, item.tensor.shallow_clone());
            load(&checkpoint, [given], &mesh, &LoadOptions::default())?;
            assert!(global.matches(&item, &mesh));
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(checkpoint.tensors().len(), 2);
}

#[test]
fn a_wrong_key_is_told() {
    if !is_client("a_wrong_key_is_told", 1 << 30, "another secret") {
        return;
    }
    let store = Store::open(ADDRESS).unwrap();
    let read = Checkpoint::open(&store, Which::Latest).unwrap_err().to_string();
    let written = save(&[1], 0).unwrap_err();
    for told in [read, written] {
        assert!(told.contains("check the credentials") && told.contains("s3://bucket/some/run"), "{told}");
    }
}

#[test]
fn a_full_bucket_is_told() {
    if !is_client("a_full_bucket_is_told", 40 << 20, "the-secret") {
        return;
    }
    save(&[1], 0).unwrap();
    let told = save(&[2], 0).unwrap_err();
    assert!(told.contains("step-2/") && told.contains("the bucket is full"), "{told}");
    let checkpoint = Checkpoint::open(&Store::open(ADDRESS).unwrap(), Which::Latest).unwrap();
    assert_eq!(checkpoint.step(), 1);
    checkpoint.verify(|_| ()).unwrap();
}
